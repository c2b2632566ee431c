"""Small tensors that travel coded: nothing is lost, all ranks agree, and dense training stays what it was."""

import numpy as np
import pytest
from contract_tools import Case
from contract_tools import make_exchange as make_compressor_exchange
from contract_tools import specs as contract_specs
from exchange_tools import SHAPES, gradient, make_exchange, parameters, run_step

from dgc.errors import DGCError, LayoutError
from dgc.transport.local import run_ranks

NAMES = list(SHAPES)
SMALL = ("conv.bias", "fc.bias", "head.weight")
COMPRESSORS = [
    Case("qsgd"),
    Case("onebit"),
    Case("topk", {"sparsity": 0.9}),
]
CODED = {"sparsity": 0.9, "small": "int8", "bucket_bytes": 2048}


def grads(step, rank, specs=None, dtype="float32"):
    return [gradient(step, rank, i, p.numel, dtype) for i, p in enumerate(specs or parameters())]


def errors(exchange):
    """What each small tensor's codec has lost so far, copied, by name."""
    return {n: exchange.state.error(NAMES.index(n)).copy() for n in SMALL}


def steps(exchange, count, first=0):
    """Results of some steps by step; no momentum, so a result is the mean or sum of what was sent."""
    return [run_step(exchange, grads(first + i, exchange.transport.rank))[1] for i in range(count)]


def assert_kept(one_rank):
    """What ``one_rank`` returns, what was lost so far before and after something, is the same."""
    for before, after in run_ranks(2, one_rank):
        for name in SMALL:
            assert before[name].tobytes() == after[name].tobytes()


@pytest.mark.parametrize("codec", ["int8", "int3", "float16", "int2"])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_what_is_sent_and_what_stays_are_what_came_in(op, codec):
    def one_rank(transport):
        exchange = make_exchange(transport, **{**CODED, "small": codec, "op": op})
        results = steps(exchange, 6)
        return results, errors(exchange)

    ranks = 3
    out = run_ranks(ranks, one_rank)
    for name in SMALL:
        i = NAMES.index(name)
        came = sum(gradient(s, r, i, parameters()[i].numel).astype(np.float64) for s in range(6) for r in range(ranks))
        share = ranks if op == "average" else 1
        sent = share * sum(result[i].astype(np.float64) for result in out[0][0])
        stays = sum(left[name].astype(np.float64) for _, left in out)
        assert np.abs(stays).max() > 0
        np.testing.assert_allclose(sent + stays, came, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"sparsity": 0.0}, {"sparsity": 0.9, "rampup_begin_step": 9}, {"sparsity": 0.5, "values": "float32", "op": "sum"}],
    ids=["sparsity 0", "warm-up", "dense sum"],
)
def test_dense_steps_and_sums_are_exact(options):
    ranks = 8 if "op" in options else 2
    coded = run_ranks(ranks, lambda t: steps(make_exchange(t, small="int8", **options), 3))
    exact = run_ranks(ranks, lambda t: steps(make_exchange(t, small="float32", **options), 3))
    for a, b in zip(coded[0], exact[0], strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_are_coded_in_float32_or_not_at_all(dtype):
    def one_rank(transport):
        exchange = make_exchange(transport, dtype=dtype, **CODED)
        _, results = run_step(exchange, grads(0, transport.rank, parameters(dtype=dtype), dtype))
        return results, exchange.state.error(1).copy()

    out = run_ranks(2, one_rank)
    exact = np.mean([gradient(0, r, 1, 8, dtype).astype(np.float64) for r in range(2)], axis=0)
    if dtype == "float64":
        assert out[0][1].size == 0
        np.testing.assert_allclose(out[0][0][1], exact, rtol=1e-15)
    else:
        assert out[0][1].dtype == np.float32
        assert out[0][1].any()
        np.testing.assert_allclose(out[0][0][1], exact, atol=0.4 / 254)


@pytest.mark.parametrize("spoiled", ["conv.bias", "fc.weight"])
@pytest.mark.filterwarnings("ignore:NaN, infinity")
def test_a_refused_step_leaves_the_residual_as_it_was(spoiled):
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 2)
        before = errors(exchange)
        given = grads(2, transport.rank)
        if transport.rank == 1:
            given[NAMES.index(spoiled)][3] = np.nan
        refused, _ = run_step(exchange, given)
        return refused, before, errors(exchange), steps(exchange, 1, first=3)

    def without(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 2)
        return steps(exchange, 1, first=3)

    plain = run_ranks(2, without)
    for (refused, before, after, results), expected in zip(run_ranks(2, one_rank), plain, strict=True):
        assert refused
        for name in SMALL:
            assert before[name].tobytes() == after[name].tobytes()
            i = NAMES.index(name)
            assert results[0][i].tobytes() == expected[0][i].tobytes()


@pytest.mark.filterwarnings("ignore:NaN, infinity")
def test_gradient_and_residual_that_add_up_to_infinity_refuse_the_step():
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 1)
        state = exchange.state_dict()
        state["parameters"]["conv.bias"]["error"][2] = 3e38
        exchange.load_state_dict(state)
        given = grads(1, transport.rank)
        given[NAMES.index("conv.bias")][2] = 3e38
        return run_step(exchange, given)[0], exchange.state.error(1)[2]

    assert run_ranks(2, one_rank) == [(True, np.float32(3e38))] * 2


def end_of_step(exchange, given):
    if exchange.transport.rank == 1:
        exchange.fail(LayoutError("enough"), 0)
    exchange.submit(0, given[0], given[0].copy())
    exchange.finish()


def test_a_failed_step_leaves_the_residual_as_it_was():
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 2)
        before = errors(exchange)
        given = grads(2, transport.rank)
        for i in reversed(range(1, len(given))):
            exchange.submit(i, given[i], given[i].copy())
        with pytest.raises(DGCError, match="enough"):
            end_of_step(exchange, given)
        return before, errors(exchange)

    assert_kept(one_rank)


def test_reset_forgets_and_a_state_without_residuals_is_accepted():
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 2)
        assert exchange.state.residual_norm() > 0
        old = exchange.state_dict()
        for name in SMALL:
            assert old["parameters"][name].pop("error").any()
        exchange.load_state_dict(old)
        found = [errors(exchange), exchange.state_dict()["parameters"]["fc.bias"].keys()]
        steps(exchange, 1)
        exchange.reset()
        return [*found, errors(exchange), exchange.state.residual_norm()]

    for loaded, keys, after_reset, norm in run_ranks(2, one_rank):
        assert set(keys) == {"u"}
        assert not any(e.any() for e in [*loaded.values(), *after_reset.values()])
        assert norm == 0


def test_what_is_owed_is_sent_by_the_first_step_that_codes_nothing():
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 2)
        owed, state = errors(exchange), exchange.state_dict()
        exact = make_exchange(transport, **{**CODED, "small": "float32"})
        exact.load_state_dict(state)
        return owed, steps(exact, 2, first=2), errors(exact), exact.state_dict()["parameters"]["fc.bias"].keys()

    out = run_ranks(2, one_rank)
    for name in SMALL:
        i = NAMES.index(name)
        n = parameters()[i].numel
        with_owed = np.mean([gradient(2, r, i, n) + out[r][0][name] for r in range(2)], axis=0)
        np.testing.assert_allclose(out[0][1][0][i], with_owed, atol=1e-8)
        np.testing.assert_allclose(
            out[0][1][1][i], np.mean([gradient(3, r, i, n) for r in range(2)], axis=0), atol=1e-8
        )
        assert not out[0][2][name].any()
    assert set(out[0][3]) == {"u"}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda e: np.full_like(e, np.nan), "saved error of 'fc.bias' holds 33 values that are not finite"),
        (lambda e: e[:-1], "saved error has shape"),
        (lambda e: "text", "saved error of 'fc.bias'"),
    ],
)
def test_a_damaged_residual_is_refused_and_nothing_changes(damage, complaint):
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 2)
        before, state = errors(exchange), exchange.state_dict()
        entry = state["parameters"]["fc.bias"]
        entry["error"] = damage(entry["error"])
        with pytest.raises(LayoutError, match=complaint):
            exchange.load_state_dict(state)
        return before, errors(exchange)

    assert_kept(one_rank)


def test_a_residual_of_a_tensor_that_travels_exactly_is_refused():
    def one_rank(transport):
        exchange = make_exchange(transport, **CODED)
        steps(exchange, 1)
        state = exchange.state_dict()
        with pytest.raises(LayoutError, match=r"'fc.bias' is sent exactly here.*exclude"):
            make_exchange(transport, **CODED, exclude="fc.bias").load_state_dict(state)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("case", COMPRESSORS, ids=str)
def test_every_compressor_can_have_them_coded(case):
    shapes = {"w": (40, 40), "b": (50,)}

    def one_rank(transport):
        exchange = make_compressor_exchange(transport, case, shapes=shapes, small="int8")
        results = [run_step(exchange, grads(s, transport.rank, contract_specs(shapes)))[1] for s in range(3)]
        return results, exchange.state.error(1).copy(), exchange.stats

    out = run_ranks(2, one_rank)
    came = sum(gradient(s, r, 1, 50).astype(np.float64) for s in range(3) for r in range(2))
    sent = 2 * sum(results[1].astype(np.float64) for results in out[0][0])
    np.testing.assert_allclose(sent + out[0][1] + out[1][1], came, atol=1e-5)
    stats = out[0][2]
    assert stats.last.small_bytes == 8 + 56  # a scale and 50 codes, each padded to 8 bytes
    assert stats.as_dict()["total"]["small_bytes"] == 3 * stats.last.small_bytes
