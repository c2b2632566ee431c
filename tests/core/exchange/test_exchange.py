"""The exchange as a whole, on ranks that are threads of this process."""

import threading
import warnings

import numpy as np
import pytest
from exchange_tools import (
    errors_of,
    gradients,
    on_ranks,
    paper,
    parameters,
    run_step,
    same_results,
    train,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.codecs import SparseCodec
from dgc.core.compressors import compressor_class
from dgc.core.exchange.step import Hyper
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import ConfigError, LayoutError

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
    expected = paper(ranks, {**options, "rampup_begin_step": 20}, 20)
    assert worst(out[0][0], expected) <= 1e-5


@pytest.mark.parametrize("options", [*MOMENTA, {"momentum": 0.9, "local_grad_clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("masking", [True, False])
def test_follows_the_paper_through_the_rampup(options, masking):
    options = {
        **options,
        "momentum_masking": masking,
        "rampup_begin_step": 4,
        "rampup_step": 6,
        "sparsity": (0.75, 0.9, 0.98),
    }
    assert worst(train(2, 16, **options)[0][0], paper(2, options, 16)) <= 2e-6


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    values=st.sampled_from(["float32", "float16", "int8", "int4", "int3", "int2"]),
    indices=st.sampled_from(["uint16", "elias_fano"]),
    nesterov=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
    bad=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_nothing_is_lost(shapes, sparsity, values, indices, nesterov, dtype, bad, seed):
    """sent + residual after = residual before + increment, on every rank and step; a refused step sends nothing."""
    named = {f"p{i}": s for i, s in enumerate(shapes)}
    m = 0.9

    def steps(exchange, rank):
        state, told = exchange.state, []
        for step in range(4):
            grads = gradients(step, rank, named, dtype, seed)
            overflow = bad and step == 2
            if overflow and rank == 1:
                grads[0][0] = np.inf
            before = [state.residual(i).copy() for i in range(len(named))]
            refused, results = run_step(exchange, grads)
            assert refused == overflow
            sent = []
            for i, (g, old) in enumerate(zip(grads, before, strict=True)):
                u, v = state.momentum_buffer(i), state.residual(i)
                g = np.where(np.isfinite(g), g, 0).astype(v.dtype)
                increment = g + np.asarray(m, u.dtype) * u if nesterov else u
                sent.append(old + increment - v)
                if refused:
                    np.testing.assert_allclose(sent[-1], 0, atol=1e-6 * (np.abs(old).max() + np.abs(increment).max()))
            told.append((sent, results))
        return told

    options = dict(dtype=dtype, sparsity=sparsity, momentum=m, nesterov=nesterov, values=values, indices=indices)
    one, other = on_ranks(2, steps, named, **options, min_numel=0, momentum_masking=False)
    for step, ((sent, results), (others, same)) in enumerate(zip(one, other, strict=True)):
        for a, b, result, again in zip(sent, others, results, same, strict=True):
            np.testing.assert_array_equal(result, again)
            if bad and step == 2:
                assert np.isnan(result).all()
            else:
                scale = max(np.abs(a).max(), np.abs(b).max()) + 0.3
                np.testing.assert_allclose((a + b) / 2, result, atol=2e-6 * scale)


@pytest.mark.parametrize("algorithm", ["dgc", "strom", "onebit"])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_a_message_that_decodes_to_something_not_finite_is_refused_by_all(monkeypatch, algorithm, damage):
    damaged = []
    owner = SparseCodec if algorithm == "dgc" else compressor_class(algorithm)
    decode = owner.decode

    def damaging(*arguments):
        found = decode(*arguments)
        values = found[1] if algorithm == "dgc" else found.values
        if damaged:
            (values[0] if isinstance(values, list) else values)[:1] = damage
        return found

    monkeypatch.setattr(owner, "decode", damaging)

    def three_steps(exchange, rank):
        return [run_step(exchange, gradients(step, rank)) for step in range(3)]

    options = {"algorithm": algorithm, "loss_scale": lambda: 1.0}
    assert [refused for refused, _ in on_ranks(2, three_steps, **options)[0]] == [False] * 3
    damaged.append(True)
    for outcomes in on_ranks(2, three_steps, **options):
        assert [refused for refused, _ in outcomes] == [True] * 3
        assert all(np.isnan(results[2]).all() for _, results in outcomes)


@pytest.mark.parametrize("kernels", [ReferenceKernels, NumbaKernels])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_finite_gradients_that_overflow_are_refused_and_forgotten(kernels, op):
    """In v, because of what it holds; or only in the sum over the ranks."""

    def steps(exchange, rank):
        history = []
        for step in range(8):
            grads = gradients(step, rank)
            if step in (2, 3):
                grads[2][5:400] = 3e38 if op == "average" else 2e38
            history.append(run_step(exchange, grads))
        return history

    for history in on_ranks(2, steps, kernels=kernels(), momentum=0.9, op=op, loss_scale=lambda: 1.0):
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
    options = {**({} if "algorithm" in options else {"momentum": 0.9, "weight_decay": 0.1}), **options}
    values = [np.full(p.numel, 3e38, np.float32) for p in parameters()]

    def steps(exchange, rank):
        for step, spoilt in enumerate([1.0, np.inf if rank else -np.inf, 3e38, 1.0, 1e-3]):
            grads = gradients(step, rank)
            for g in grads:
                g[:5] = spoilt
            run_step(exchange, grads, values, limit=6e4)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        on_ranks(2, steps, kernels=kernels(), loss_scale=lambda: 1e-3, **options)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_refused_step_without_a_scaler_is_told_once_with_rank_parameter_and_step(scaled):
    def steps(exchange, rank):
        for step in range(4):
            grads = gradients(step, rank)
            if step >= 2 and rank == 1:
                grads[2][5] = np.nan
            run_step(exchange, grads)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, steps, loss_scale=(lambda: 1.0) if scaled else 1.0)
    texts = sorted(str(w.message) for w in caught)
    expected = [] if scaled else ["rank 1 in the gradient of 'fc.weight'", "rank 1, whose own message"]
    assert len(texts) == len(expected), texts
    for text, part in zip(texts, expected, strict=True):
        assert part in text
        assert "in step 2" in text


def test_without_error_feedback_nothing_stays_whatever_becomes_of_the_step():
    def steps(exchange, rank):
        for spoilt in (False, True):
            grads = gradients(0, rank)
            grads[2][5] = np.nan if spoilt else 1.0
            assert run_step(exchange, grads)[0] is spoilt
            assert not exchange.state.residual_norm()

    options = {"sparsity": 0.9, "error_feedback": False, "small": "int8"}
    on_ranks(2, steps, algorithm="topk", **options, loss_scale=lambda: 1.0)


@pytest.mark.filterwarnings("ignore:NaN, infinity")
def test_a_refused_dense_step_leaves_no_trace():
    """Overflow on rank 1 alone: both refuse. In sparse steps: test_plans.py and test_compressors.py."""

    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank))
        before, grads = exchange.state_dict(), gradients(1, rank)
        if rank == 1:
            grads[2][5] = np.nan
        refused, results = run_step(exchange, grads)
        assert refused
        assert np.isnan(results[2]).all()
        np.testing.assert_equal(exchange.state_dict(), before)
        assert not run_step(exchange, gradients(2, rank))[0]

    on_ranks(2, steps, sparsity=0.9, momentum=0.9, rampup_begin_step=10, bucket_bytes=2048)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("small", ["float32", "int8"])
def test_loss_scale_is_divided_out_before_and_multiplied_back_after(later, small):
    """Also where the scale is still on its way when the first gradient comes: no gradient's caller waits for it."""
    asked_by, options = set(), {"sparsity": 0.9, "momentum": 0.9, "small": small}

    def coming(value):
        asked_by.add(threading.current_thread().name)
        return value

    def scaled_by(scales):
        def steps(exchange, rank):
            results = []
            for step, scale in enumerate(scales):
                exchange.loss_scale = lambda: (lambda: coming(scale)) if later else scale  # noqa: B023
                found = run_step(exchange, [g * np.float32(scale) for g in gradients(step, rank)])[1]
                results.append([r / np.float32(scale) for r in found])
            return results

        return on_ranks(2, steps, **options)[0]

    scaled = scaled_by([8.0, 8.0, 2.0])
    assert asked_by == ({"dgc-exchange"} if later else set())
    same_results(scaled, scaled_by([1.0] * 3))


def test_a_missing_gradient_is_one_error_on_all_ranks():
    def step(exchange, rank):
        for i, g in enumerate(gradients(0, 0)):
            if (rank, i) != (1, 2):
                exchange.submit(i, g, np.empty_like(g))
        exchange.finish()

    errors = errors_of(3, step)
    assert all(isinstance(e, LayoutError) and "fc.weight" in str(e) for e in errors), errors
    assert "rank 1" in str(errors[0])


@pytest.mark.parametrize("later", [False, True])
def test_loss_scale_must_be_positive_and_finite(later):
    def step(exchange, rank):
        scale = float(rank != 1)
        exchange.loss_scale = lambda: (lambda: scale) if later else scale
        run_step(exchange, gradients(0, rank))

    errors = errors_of(2, step)
    assert all(isinstance(e, ConfigError) and "loss_scale" in str(e) for e in errors), errors


def test_ranks_compare_everything_that_they_must_share_and_no_rounding():
    def digest(**changes):
        plain = {"momentum": [0.9, 0.0], "nesterov": [True, False], "weight_decay": [0.0, 1e-4], "gain": [1.0, 0.1]}
        return Hyper(**{**plain, "learning_rates": (0.1, 0.01), **changes}).digest()

    changed = [
        {"momentum": [0.9, 0.5]},
        {"momentum": [0.0, 0.9]},
        {"nesterov": [False, True]},
        {"weight_decay": [0.0, 1e-4 + 1e-12]},
        {"gain": [1.0, 0.2]},
        {"learning_rates": (0.1,)},
        {"learning_rates": (0.01, 0.1)},
        {"learning_rates": (0.1, 0.010001)},
        {"restored": True},
    ]
    assert len({digest(), *(digest(**each) for each in changed)}) == 1 + len(changed)
    assert digest(learning_rates=(0.1 + 1e-9, 0.01)) == digest()
