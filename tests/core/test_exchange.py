"""The exchange as a whole, on ranks that are threads of this process."""

from __future__ import annotations

import dataclasses
import functools
import time
from unittest.mock import Mock

import numpy as np
import pytest
from exchange_tools import (
    SHAPES,
    Oracle,
    dense_sgd,
    first_gradients,
    gradient,
    make_exchange,
    parameters,
    run_step,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.compressors.build import make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.state.layout import Parameter, make_layout
from dgc.core.state.state import resized
from dgc.core.wire import HEADER_BYTES
from dgc.errors import ConfigError, DGCError, LayoutError, RemoteError, WireError
from dgc.transport.local import run_ranks

MOMENTA = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


def worst(actual, expected):
    """Largest difference of any tensor, relative to that tensor's largest entry."""
    return max(np.abs(a - e).max() / np.abs(e).max() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("options", MOMENTA, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_before_rampup_it_is_dense_sgd(ranks, options):
    out = train(ranks, 20, rampup_begin_step=1000, **options)
    expected = dense_sgd(ranks, 20, **options)
    assert worst(out[0][0], expected) <= 1e-6


@pytest.mark.parametrize("options", MOMENTA, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 2048])
def test_sparsity_zero_is_dense_sgd(ranks, options, bucket_bytes):
    out = train(ranks, 20, sparsity=0.0, momentum_masking=False, bucket_bytes=bucket_bytes, **options)
    expected = dense_sgd(ranks, 20, **options)
    assert worst(out[0][0], expected) <= 1e-5


@pytest.mark.parametrize("options", MOMENTA, ids=str)
def test_sum_equals_sgd_on_summed_gradients(options):
    out = train(2, 20, sparsity=0.0, momentum_masking=False, op="sum", **options)
    assert worst(out[0][0], dense_sgd(2, 20, op="sum", **options)) <= 1e-5
    out = train(2, 20, rampup_begin_step=100, op="sum", **options)
    assert worst(out[0][0], dense_sgd(2, 20, op="sum", **options)) <= 1e-6


@pytest.mark.parametrize("options", MOMENTA, ids=str)
@pytest.mark.parametrize("masking", [True, False])
def test_follows_the_paper_through_the_rampup(options, masking):
    options = {
        **options,
        "momentum_masking": masking,
        "rampup_begin_step": 4,
        "rampup_step": 6,
        "sparsity": (0.75, 0.9, 0.98),
    }
    out = train(2, 16, **options)
    expected = Oracle(2, options).train(16)
    assert worst(out[0][0], expected) <= 2e-6


def test_local_clipping_per_tensor_follows_the_paper():
    options = {"momentum": 0.9, "sparsity": 0.9, "local_grad_clip_norm": 0.5}
    assert worst(train(2, 10, **options)[0][0], Oracle(2, options).train(10)) <= 2e-6
    unclipped = train(2, 10, momentum=0.9, sparsity=0.9)
    assert worst(unclipped[0][0], Oracle(2, options).train(10)) > 1e-3


def test_global_clipping_scales_every_gradient_by_one_norm_from_the_first_step():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(
            transport, local_grad_clip_norm=0.25, clip_scope="global", rampup_begin_step=5, bucket_bytes=2048
        )
        assert len(exchange.layout.buckets) > 1
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(specs)]
        results = [np.empty_like(g) for g in grads]
        for i in reversed(range(len(specs))):
            exchange.submit(i, grads[i], results[i])
            # A bucket that did not wait for all gradients would be on its way by now, with too small a norm.
            time.sleep(0.02)
        exchange.finish()
        exchange.close()
        return grads, results

    out = run_ranks(2, rank)
    expected = [0.0] * len(specs)
    for grads, _ in out:
        norm = np.sqrt(sum(np.dot(g, g) for g in grads))
        assert norm > 0.25 * 2**0.5
        for i, g in enumerate(grads):
            expected[i] = expected[i] + g * (0.25 * 2**0.5 / norm) / 2
    for result, e in zip(out[0][1], expected, strict=True):
        np.testing.assert_allclose(result, e, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("indices", ["uint16", "int32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_are_bit_identical(ranks, indices, values):
    out = train(
        ranks,
        30,
        sparsity=(0.5, 0.9, 0.99),
        rampup_step=15,
        rampup_begin_step=3,
        momentum=0.9,
        indices=indices,
        values=values,
        bucket_bytes=4096,
    )
    for params, _ in out[1:]:
        for a, b in zip(params, out[0][0], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("order", ["forward", "random"])
def test_order_of_gradients_does_not_matter(order):
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9, bucket_bytes=2048)
        assert len(exchange.layout.buckets) > 1
        outs = []
        for step in range(5):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            shuffled = list(range(len(specs)))
            if order == "random":
                np.random.default_rng([step, transport.rank]).shuffle(shuffled)
            outs.append(run_step(exchange, grads, order=shuffled)[1])
        exchange.close()
        return outs

    shuffled = run_ranks(2, rank)
    usual = []
    train(
        2,
        5,
        sparsity=0.9,
        momentum=0.9,
        bucket_bytes=2048,
        on_step=lambda r, s, e, p, res: usual.append(res) if r == 0 else None,
    )
    for a, b in zip(shuffled[1], usual, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    values=st.sampled_from(["float32", "float16", "bfloat16", "int8", "sign"]),
    indices=st.sampled_from(["uint16", "int32"]),
    nesterov=st.booleans(),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    bad=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_nothing_is_lost(shapes, sparsity, values, indices, nesterov, dtype, bad, seed):
    """sent + residual after = residual before + increment, on every rank and step; a refused step sends nothing."""
    named = {f"p{i}": s for i, s in enumerate(shapes)}
    specs = parameters(named, dtype)
    m = 0.9

    def rank(transport):
        exchange = make_exchange(
            transport,
            named,
            dtype=dtype,
            sparsity=sparsity,
            momentum=m,
            nesterov=nesterov,
            values=values,
            indices=indices,
            min_numel=0,
            momentum_masking=False,
        )
        sent_total = []
        for step in range(4):
            grads = [gradient(step, transport.rank, i, p.numel, dtype, seed) for i, p in enumerate(specs)]
            overflow = bad and step == 2
            if overflow and transport.rank == 1:
                grads[0][0] = np.inf
            before = [exchange.state.residual(i).copy() for i in range(len(specs))]
            refused, results = run_step(exchange, grads)
            assert refused == overflow
            clean = [
                np.where(np.isfinite(g), g, 0).astype(exchange.state.residual(i).dtype) for i, g in enumerate(grads)
            ]
            increments = []
            for i, g in enumerate(clean):
                u = exchange.state.momentum_buffer(i)
                increments.append(g + np.asarray(m, u.dtype) * u if nesterov else u.copy())
            sent = [
                b + inc - exchange.state.residual(i) for i, (b, inc) in enumerate(zip(before, increments, strict=True))
            ]
            if refused:
                for s, b, inc in zip(sent, before, increments, strict=True):
                    np.testing.assert_allclose(s, 0, atol=1e-6 * (np.abs(b).max() + np.abs(inc).max()))
            sent_total.append((sent, results, refused))
        exchange.close()
        return sent_total

    out = run_ranks(2, rank)
    for step in range(4):
        refused = out[0][step][2]
        for i in range(len(specs)):
            sent = [out[r][step][0][i] for r in range(2)]
            result = out[0][step][1][i]
            if refused:
                assert np.isnan(result).any() or i > 0
            else:
                scale = max(np.abs(s).max() for s in sent) + 0.3
                np.testing.assert_allclose((sent[0] + sent[1]) / 2, result, atol=2e-6 * scale)
            np.testing.assert_array_equal(result, out[1][step][1][i])


def test_entries_sent_are_at_most_k_and_the_largest():
    from dgc.core.config.schedule import entries_to_send

    kept = {}

    def look(rank, step, exchange, params, results):
        if rank == 0 and step == 9:
            kept.update(exchange.stats.last.as_dict())

    train(2, 10, sparsity=0.99, momentum=0.9, on_step=look)
    ks = [entries_to_send(int(np.prod(s)), 0.01) for n, s in SHAPES.items() if len(s) > 1 and np.prod(s) >= 64]
    elements = sum(int(np.prod(s)) for n, s in SHAPES.items() if len(s) > 1 and np.prod(s) >= 64)
    assert kept["density"] == pytest.approx(sum(ks) / elements)


@pytest.mark.parametrize("begin", [0, 10])
def test_a_refused_step_leaves_no_trace_but_the_finite_gradient(begin):
    """Overflow on rank 1 alone: both refuse, dense momentum and the step counter stay, residuals keep the gradient."""
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9, rampup_begin_step=begin, bucket_bytes=2048)
        history = []
        for step in range(6):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            before = exchange.state.to_dict()
            if step == 3 and transport.rank == 1:
                grads[2][5] = np.nan
            refused, results = run_step(exchange, grads)
            history.append((refused, results, before, exchange.state.to_dict()))
        exchange.close()
        return history

    out = run_ranks(2, rank)
    for own_rank, history in enumerate(out):
        assert [h[0] for h in history] == [False, False, False, True, False, False]
        _, results, before, after = history[3]
        assert after["step"] == before["step"] == 3
        assert np.isnan(results[2]).all()
        for name in SHAPES:
            if "v" not in before["parameters"][name] or begin:
                np.testing.assert_array_equal(before["parameters"][name]["u"], after["parameters"][name]["u"])
        if begin == 0:
            # What was sent is back: u and v are those of a step that accumulated and sent nothing.
            for i, name in enumerate(SHAPES):
                old, new = before["parameters"][name], after["parameters"][name]
                if "v" not in old:
                    continue
                g = gradient(3, own_rank, i, old["u"].size)
                if own_rank == 1 and i == 2:
                    g[5] = 0
                np.testing.assert_allclose(new["u"], np.float32(0.9) * old["u"] + g, atol=1e-6)
                np.testing.assert_allclose(new["v"], old["v"] + new["u"], atol=1e-6)
    for a, b in zip(out[0], out[1], strict=True):
        for x, y in zip(a[1], b[1], strict=True):
            np.testing.assert_array_equal(x, y)


def test_loss_scale_is_divided_out_before_and_multiplied_back_after():
    scales = iter([8.0, 8.0, 2.0])
    seen = {}

    def rank(transport):
        specs = parameters()
        scale = {"now": 8.0}
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9, loss_scale=lambda: scale["now"])
        out = []
        for step, s in enumerate([8.0, 8.0, 2.0]):
            scale["now"] = s
            grads = [gradient(step, transport.rank, i, p.numel) * np.float32(s) for i, p in enumerate(specs)]
            _, results = run_step(exchange, grads)
            out.append([r / np.float32(s) for r in results])
        exchange.close()
        return out

    scaled = run_ranks(2, rank)[0]
    plain = []
    train(2, 3, sparsity=0.9, momentum=0.9, on_step=lambda r, s, e, p, res: plain.append(res) if r == 0 else None)
    del scales, seen
    for a, b in zip(scaled, plain, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_result_beyond_the_gradients_type_refuses_the_step():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.5)
        grads = [np.full(p.numel, 1000.0, np.float32) for p in specs]
        refused, _ = run_step(exchange, grads, limit=999.0)
        accepted, _ = run_step(exchange, [g * 0 for g in grads], limit=9999.0)
        exchange.close()
        return refused, accepted, exchange.state.step

    assert run_ranks(2, rank) == [(True, False, 1)] * 2


def test_a_run_that_was_saved_continues_bit_for_bit():
    options = dict(sparsity=(0.5, 0.9), rampup_step=6, rampup_begin_step=2, momentum=0.9, values="float16")
    straight = train(2, 12, **options)
    specs = parameters()

    def rank(transport):
        rng = np.random.default_rng(1)
        params = [rng.standard_normal(p.numel).astype("float32") for p in specs]
        exchange = make_exchange(transport, **options)
        for step in range(12):
            if step == 5:
                saved = exchange.state_dict()
                exchange.close()
                exchange = make_exchange(transport, **options)
                exchange.load_state_dict(saved)
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            _, results = run_step(exchange, grads, params)
            for p, r in zip(params, results, strict=True):
                p -= np.float32(0.1) * r
        exchange.close()
        return params

    for a, (b, _) in zip(run_ranks(2, rank), straight, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (3, 2), (2, 3), (1, 2)])
def test_resizing_keeps_the_mean_residual_and_momentum(old, new):
    out = train(old, 8, sparsity=0.95, momentum=0.9)
    states = [e.state.to_dict() for _, e in out]
    fresh = [resized(states, r, new, 0) for r in range(new)]
    for name, entry in states[0]["parameters"].items():
        for key in entry.keys() - {"control"}:
            before = np.mean([s["parameters"][name][key] for s in states], axis=0)
            after = np.mean([s["parameters"][name][key] for s in fresh], axis=0)
            np.testing.assert_allclose(after, before, atol=1e-6)
            if "v" not in entry:
                for s in fresh:
                    np.testing.assert_array_equal(s["parameters"][name][key], entry[key])


def errors_of(ranks, function):
    """Run on all ranks; returns each rank's error."""

    def guarded(transport):
        try:
            function(transport)
        except DGCError as error:
            return error
        return None

    return run_ranks(ranks, guarded, timeout=20)


def test_a_missing_gradient_is_one_error_on_all_ranks():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport)
        for i, p in enumerate(specs):
            if transport.rank == 1 and i == 2:
                continue
            exchange.submit(i, gradient(0, 0, i, p.numel), np.empty(p.numel, np.float32))
        exchange.finish()

    errors = errors_of(3, rank)
    assert all(isinstance(e, LayoutError) and "fc.weight" in str(e) for e in errors), errors
    assert "rank 1" in str(errors[0])


@pytest.mark.parametrize("fault", ["shape", "twice", "kernel"])
def test_a_failing_rank_is_one_error_on_all_ranks_and_nothing_is_lost(fault):
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, bucket_bytes=2048, min_numel=64)
        before = None
        try:
            for step in range(3):
                grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
                if step == 2:
                    before = exchange.state.to_dict()
                    if transport.rank == 0:
                        if fault == "shape":
                            grads[0] = grads[0][:-1]
                        if fault == "twice":
                            # While others are missing: once all are in, the step may be over at any moment.
                            exchange.submit(0, grads[0], np.empty_like(grads[0]))
                            exchange.submit(0, grads[0], np.empty_like(grads[0]))
                        if fault == "kernel":
                            grads[0] = np.array(["x"] * grads[0].size)
                run_step(exchange, grads)
        finally:
            exchange.reset() if before is None else None
            exchange.close()

    errors = errors_of(2, rank)
    assert all(isinstance(e, DGCError) for e in errors), errors
    assert "rank 0" in str(errors[1])


def test_a_rank_that_fails_again_after_its_error_begins_no_step_that_the_others_are_not_in():
    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        grads = first_gradients(transport.rank)
        if transport.rank == 1:
            with pytest.raises(LayoutError, match=r"^rank 1 failed in step 0: mine$"):
                exchange.fail(LayoutError("mine"))
            for _ in range(2):
                with pytest.raises(RemoteError, match=r"mine\); call reset"):
                    exchange.fail(LayoutError("mine again"))
        else:
            with pytest.raises(LayoutError, match="rank 1 failed in step 0: mine"):
                run_step(exchange, grads)
        exchange.reset()
        run_step(exchange, grads)
        exchange.close()
        return exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [1, 1]


def test_the_error_of_a_rank_counts_more_than_that_it_had_other_options():
    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        grads = first_gradients(transport.rank)
        if transport.rank == 1:
            exchange.hyper = dataclasses.replace(exchange.hyper, learning_rates=(0.1,))
            exchange.fail(LayoutError("mine"))
        run_step(exchange, grads)

    errors = errors_of(3, rank)
    assert [str(e) for e in errors] == ["rank 1 failed in step 0: mine"] * 3


@pytest.mark.parametrize(
    ("begin", "expected"), [(0, "rank 1 failed in step 0: "), (9, "rank 1 left before allreduce ")]
)
def test_a_rank_that_cannot_use_what_it_received_tells_the_others_in_the_next_bucket(begin, expected):
    """Unless the bucket has another collective, in which no error can be told."""
    shapes = {"a": (600, 500), "b": (500, 600)}

    def rank(transport):
        options = dict(sparsity=0.9, bucket_bytes=1_000_000, rampup_begin_step=begin)
        exchange = make_exchange(transport, shapes, **options)
        plans = [bucket.encoder.plan_at(None if begin else 0.1) for bucket in exchange._buckets]
        assert [plan.allreduces for plan in plans] == [begin > 0] * 2
        if transport.rank == 1:
            exchange._buckets[0]._buffers.sender.receive = no_room
        run_step(exchange, [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(parameters(shapes))])

    def no_room(*arguments):
        raise MemoryError("no room")

    errors = errors_of(2, rank)
    assert str(errors[0]).startswith(expected)
    assert "MemoryError: no room" in str(errors[1])


@pytest.mark.parametrize("after", ["next step", "finish", "reset"])
def test_a_failure_after_the_last_bucket_reaches_all_ranks_in_the_next_step(after):
    """It is raised on its own rank at once; the step that it came too late for counts on all ranks alike."""
    specs = parameters()
    options = dict(sparsity=(0.5, 0.75, 0.9), rampup_step=3, momentum=0.9, bucket_bytes=2048)

    def rank(transport):
        exchange = make_exchange(transport, **options)
        grads = first_gradients(transport.rank)
        results = [np.empty_like(g) for g in grads]
        for i in reversed(range(len(specs))):
            exchange.submit(i, grads[i], results[i])
        exchange.wait()
        if transport.rank == 0:
            with pytest.raises(LayoutError, match=r"^the gradient of 'fc.weight' was given twice"):
                exchange.submit(2, grads[2], results[2])
            assert exchange.owes_failure
        else:
            assert not exchange.finish()
        next_step = functools.partial(run_step, exchange, grads)
        if after != "reset":
            go_on = exchange.finish if after == "finish" and transport.rank == 0 else next_step
            with pytest.raises(LayoutError, match=r"rank 0 failed in step 1: .*'fc.weight' was given twice"):
                go_on()
            with pytest.raises(RemoteError, match="call reset"):
                run_step(exchange, grads)
        state = exchange.state.to_dict()
        exchange.reset()
        run_step(exchange, grads)
        exchange.close()
        return results, state, exchange.state.step

    out = run_ranks(2, rank, timeout=20)
    assert [steps for _, _, steps in out] == [1, 1]
    assert [state["step"] for _, state, _ in out] == [1, 1]
    for a, b in zip(out[0][0], out[1][0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("given", [0, 1, len(SHAPES)])
def test_a_state_that_is_refused_after_a_failed_step_does_not_let_training_go_on(given):
    """A step that failed before its first gradient, or was interrupted after some or all of them."""

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        grads = first_gradients(transport.rank)
        state = exchange.state_dict()
        for i in range(given):
            exchange.submit(i, grads[i], np.empty_like(grads[i]))
        if given == len(SHAPES):
            exchange.wait()
        if not given:
            with pytest.raises(LayoutError, match="mine"):
                exchange.fail(LayoutError("mine"))
        with pytest.raises(LayoutError, match="this is rank"):
            exchange.load_state_dict({**state, "rank": 7})
        with pytest.raises(RemoteError, match="given up" if given else "mine"):
            run_step(exchange, grads)
        exchange.load_state_dict(state)
        run_step(exchange, grads)
        exchange.close()
        return exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [1, 1]


def test_reset_after_a_mask_was_interrupted_starts_anew():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, kernels=NumbaKernels(1), sparsity=0.9, momentum=0.9)
        grads = first_gradients(transport.rank)
        for i in range(len(specs)):
            exchange.submit(i, grads[i], np.empty_like(grads[i]))
        exchange.wait()
        exchange._buckets[0].outcome.kept.finish = Mock(side_effect=[KeyboardInterrupt, RuntimeError("not done")])
        with pytest.raises(KeyboardInterrupt):
            exchange.finish()
        exchange.reset()
        refused, _ = run_step(exchange, grads)
        exchange.close()
        return refused, exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [(False, 1)] * 2


def test_reset_after_an_abandoned_step_starts_anew():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9)
        exchange.submit(1, gradient(0, 0, 1, specs[1].numel), np.empty(specs[1].numel, np.float32))
        exchange.reset()
        grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(specs)]
        refused, _ = run_step(exchange, grads)
        exchange.close()
        return refused, exchange.state.step

    assert run_ranks(2, rank, timeout=20) == [(False, 1)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 3}, "resize=True"),
        ({"rank": 5}, "one state per rank"),
        ({"format": 9}, "format"),
        ({"parameters": {}}, "lacks parameter"),
    ],
)
def test_a_foreign_state_is_refused(change, message):
    def rank(transport):
        exchange = make_exchange(transport)
        saved = {**exchange.state_dict(), **change}
        with pytest.raises(LayoutError, match=message):
            exchange.load_state_dict(saved)
        exchange.close()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 1.0},
        {"sparsity": -0.1},
        {"sparsity": []},
        {"sparsity": "0.9"},
        {"momentum": 1.5},
        {"weight_decay": -1},
        {"rampup_begin_step": -1},
        {"rampup_step": 0},
        {"clip_scope": "layer"},
        {"local_grad_clip_norm": 0},
        {"op": "adasum"},
        {"indices": "int7"},
        {"values": "float1"},
        {"momentum": 0, "nesterov": True},
        {"seed": -1},
        {"bucket_bytes": 0},
        {"momentum": True},
        {"momentum": np.zeros(2)},
        {"momentum": 10**400},
        {"sparsity": 10**400},
        {"sparsity": np.zeros((2, 2))},
        {"nesterov": 1},
        {"momentum_masking": "no"},
        {"error_feedback": 0},
        {"exclude": 3},
        {"include": np.zeros(3)},
        {"values": ["float16"]},
        {"min_numel": np.float32(3)},
    ],
    ids=str,
)
def test_bad_options_are_refused(options):
    def rank(transport):
        make_exchange(transport, **options)

    assert all(isinstance(e, ConfigError) for e in errors_of(1, rank))


def test_numpy_numbers_are_numbers():
    given = make_config(
        {"sparsity": np.array([0.75, 0.5]), "momentum": np.float64(0.5), "min_numel": np.int64(7), "nesterov": np.True_}
    )
    assert (
        given.describe()
        == make_config({"sparsity": (0.75, 0.5), "momentum": 0.5, "min_numel": 7, "nesterov": True}).describe()
    )
    assert type(given.min_numel) is int


def test_an_unknown_option_names_the_valid_ones():
    with pytest.raises(TypeError, match="sparsity"):
        make_config({"sparcity": 0.9})


def test_bad_parameters_are_refused():
    config = make_config({})
    for bad in (
        [],
        [Parameter("a", (2,), "float32")] * 2,
        [Parameter("a", (2,), "int64")],
        [Parameter("a", (2**31,), "float32")],
    ):
        with pytest.raises(LayoutError):
            make_layout(bad, config)


def test_loss_scale_must_be_positive_and_finite():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, loss_scale=lambda: 0.0 if transport.rank == 1 else 1.0)
        run_step(exchange, [gradient(0, 0, i, p.numel) for i, p in enumerate(specs)])

    errors = errors_of(2, rank)
    assert all(isinstance(e, ConfigError) and "loss_scale" in str(e) for e in errors), errors


def test_momentum_that_differs_between_ranks_is_an_error_on_all_ranks():
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, momentum=0.9)
        exchange.hyper.momentum[1] = 0.8 if transport.rank == 1 else 0.9
        run_step(exchange, [gradient(0, 0, i, p.numel) for i, p in enumerate(specs)])

    errors = errors_of(3, rank)
    assert all(isinstance(e, ConfigError) and "disagree in step 0" in str(e) for e in errors), errors


def test_remote_error_class_is_public():
    assert issubclass(RemoteError, DGCError)


@pytest.mark.parametrize("kernels", [NumbaKernels(1), ReferenceKernels()], ids=lambda k: k.name)
def test_a_position_between_tensors_is_a_damaged_message(kernels):
    """A tensor of 1500 elements takes 1504 places; nobody ever selects the last four."""

    def one_rank(transport):
        gather = transport.allgather

        def damaged(message, out):
            gather(message, out)
            if out.shape[1] > 100:
                positions = out[1, HEADER_BYTES : HEADER_BYTES + 4 * 15].view(np.int32)
                positions[14] = 1502

        transport.allgather = damaged
        config = make_config({"sparsity": 0.99, "indices": "int32", "momentum": 0.0})
        layout = make_layout([Parameter("a", (1500, 1), "float32"), Parameter("b", (1500, 1), "float32")], config)
        exchange = Exchange(layout, config, transport, kernels)
        norm = exchange.state.residual_norm()
        for i in range(2):
            g = np.random.default_rng(i).standard_normal(1500).astype(np.float32)
            exchange.submit(i, g, np.zeros(1500, np.float32))
        with pytest.raises(WireError, match=r"message of rank 1 .*padding"):
            exchange.finish()
        assert exchange.state.residual_norm() > norm, "nothing is lost"
        exchange.close()

    run_ranks(2, one_rank)
