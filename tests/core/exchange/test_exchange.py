"""The exchange as a whole, on ranks that are threads of this process."""

import threading
import warnings

import numpy as np
import pytest
from exchange_tools import (
    SHAPES,
    Oracle,
    dense_sgd,
    errors_of,
    gradient,
    make_exchange,
    parameters,
    run_step,
    same_results,
    train,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.codecs import SparseCodec
from dgc.core.compressors import compressor_class, make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.errors import LayoutError
from dgc.transport.local import run_ranks

MOMENTA = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


@pytest.mark.parametrize("options", MOMENTA, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 2048])
@pytest.mark.parametrize("masking", [True, False])
def test_sparsity_zero_is_dense_sgd(ranks, options, bucket_bytes, masking):
    """With the default options, too: momentum is masked where something else was sent and it is stale."""
    out = train(ranks, 20, sparsity=0.0, momentum_masking=masking, bucket_bytes=bucket_bytes, **options)
    expected = dense_sgd(ranks, 20, **options)
    assert worst(out[0][0], expected) <= 1e-5


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


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    values=st.sampled_from(["float32", "float16", "int8", "int3", "int2"]),
    indices=st.sampled_from(["uint16", "elias_fano"]),
    nesterov=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
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
                assert np.isnan(result).all()
            else:
                scale = max(np.abs(s).max() for s in sent) + 0.3
                np.testing.assert_allclose((sent[0] + sent[1]) / 2, result, atol=2e-6 * scale)
            np.testing.assert_array_equal(result, out[1][step][1][i])


@pytest.mark.parametrize("algorithm", ["dgc", "strom", "onebit"])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_a_message_that_decodes_to_something_not_finite_is_refused_by_all(monkeypatch, algorithm, damage):
    specs, damaged = parameters(), []
    owner = SparseCodec if algorithm == "dgc" else compressor_class(algorithm)
    decode = owner.decode

    def damaging(*arguments):
        found = decode(*arguments)
        values = found[1] if algorithm == "dgc" else found.values
        if damaged:
            (values[0] if isinstance(values, list) else values)[:1] = damage
        return found

    monkeypatch.setattr(owner, "decode", damaging)

    def rank(transport):
        config = make_config({"min_numel": 64}, algorithm=algorithm)
        layout = make_layout(specs, config)
        exchange = Exchange(layout, config, transport, ReferenceKernels(), loss_scale=lambda: 1.0)
        outcomes = []
        for step in range(3):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            outcomes.append(run_step(exchange, grads))
        exchange.close()
        return outcomes

    assert [refused for refused, _ in run_ranks(2, rank)[0]] == [False] * 3
    damaged.append(True)
    for outcomes in run_ranks(2, rank):
        assert [refused for refused, _ in outcomes] == [True] * 3
        assert all(np.isnan(results[2]).all() for _, results in outcomes)


@pytest.mark.parametrize("kernels", [ReferenceKernels, NumbaKernels])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_finite_gradients_that_overflow_are_refused_and_forgotten(kernels, op):
    """In v, because of what it holds; or only in the sum over the ranks."""
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, kernels=kernels(), momentum=0.9, op=op, loss_scale=lambda: 1.0)
        history = []
        for step in range(8):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            if step in (2, 3):
                grads[2][5:400] = 3e38 if op == "average" else 2e38
            history.append(run_step(exchange, grads))
        exchange.close()
        return history

    for history in run_ranks(2, rank):
        refused = [was for was, _ in history]
        assert refused[:2] == [False, False]
        assert any(refused[2:4])
        for was, results in history:
            assert was or all(np.isfinite(result).all() for result in results)


@pytest.mark.parametrize("kernels", [ReferenceKernels, NumbaKernels])
@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.9, "nesterov": True},
        {"sparsity": 0.9, "small": "int8", "bucket_bytes": 2048, "local_grad_clip_norm": 1.0},
        {"sparsity": 0.5, "op": "sum"},
        {"rampup_begin_step": 9},
        {"algorithm": "qsgd"},
        {"algorithm": "onebit"},
    ],
    ids=str,
)
def test_numpy_warns_of_nothing_in_a_step_that_overflows(options, kernels):
    specs = parameters()
    options = {**({} if "algorithm" in options else {"momentum": 0.9, "weight_decay": 0.1}), **options}

    def rank(transport):
        exchange = make_exchange(transport, kernels=kernels(), loss_scale=lambda: 1e-3, **options)
        values = [np.full(p.numel, 3e38, np.float32) for p in specs]
        for step, spoilt in enumerate([1.0, np.inf if transport.rank else -np.inf, 3e38, 1.0, 1e-3]):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            for g in grads:
                g[:5] = spoilt
            run_step(exchange, grads, values, limit=6e4)
        exchange.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run_ranks(2, rank)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_refused_step_without_a_scaler_is_told_once_with_rank_parameter_and_step(scaled):
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, loss_scale=(lambda: 1.0) if scaled else 1.0)
        for step in range(4):
            grads = [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(specs)]
            if step >= 2 and transport.rank == 1:
                grads[2][5] = np.nan
            run_step(exchange, grads)
        exchange.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, rank)
    texts = sorted(str(w.message) for w in caught)
    expected = [] if scaled else ["rank 1 in the gradient of 'fc.weight'", "rank 1, whose own warning"]
    assert len(texts) == len(expected), texts
    for text, part in zip(texts, expected, strict=True):
        assert part in text
        assert "in step 2" in text


def test_without_error_feedback_nothing_stays_whatever_becomes_of_the_step():
    def rank(transport):
        exchange = make_exchange(
            transport, algorithm="topk", sparsity=0.9, error_feedback=False, small="int8", loss_scale=lambda: 1.0
        )
        for spoilt in (False, True):
            grads = [gradient(0, transport.rank, i, p.numel) for i, p in enumerate(parameters())]
            grads[2][5] = np.nan if spoilt else 1.0
            assert run_step(exchange, grads)[0] is spoilt
            assert not exchange.state.residual_norm()
        exchange.close()

    run_ranks(2, rank)


def test_a_refused_dense_step_leaves_no_trace():
    """Overflow on rank 1 alone: both refuse, momentum and the step counter stay. In sparse steps: test_compressors."""
    specs = parameters()

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9, momentum=0.9, rampup_begin_step=10, bucket_bytes=2048)
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
    for history in out:
        assert [h[0] for h in history] == [False, False, False, True, False, False]
        _, results, before, after = history[3]
        assert after["step"] == before["step"] == 3
        assert np.isnan(results[2]).all()
        for name in SHAPES:
            np.testing.assert_array_equal(before["parameters"][name]["u"], after["parameters"][name]["u"])
    same_results(*([results for _, results, *_ in history] for history in out))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("small", ["float32", "int8"])
def test_loss_scale_is_divided_out_before_and_multiplied_back_after(later, small):
    """Also where the scale is still on its way when the first gradient comes: no gradient's caller waits for it."""
    asked_by, options = set(), {"sparsity": 0.9, "momentum": 0.9, "small": small}

    def coming(value):
        asked_by.add(threading.current_thread().name)
        return value

    def rank(transport):
        specs = parameters()
        scale = {"now": 8.0}

        def read():
            now = scale["now"]
            return (lambda: coming(now)) if later else now

        exchange = make_exchange(transport, **options, loss_scale=read)
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
    train(2, 3, **options, on_step=lambda r, s, e, p, res: plain.append(res) if r == 0 else None)
    assert asked_by == ({"dgc-exchange"} if later else set())
    same_results(scaled, plain)


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
