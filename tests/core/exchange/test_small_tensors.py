"""Small tensors that travel coded: nothing is lost, all ranks agree, and dense training stays what it was."""

import numpy as np
import pytest
from contract_tools import Case, train
from exchange_tools import SHAPES, gradient, gradients, make_exchange, on_ranks, parameters, run_step, same_results

from dgc.errors import DGCError, LayoutError

NAMES = list(SHAPES)
SMALL = ("conv.bias", "fc.bias", "head.weight")
CODED = {"sparsity": 0.9, "small": "int8", "bucket_bytes": 2048}


def errors(exchange):
    """What each small tensor's codec has lost so far, copied, by name."""
    return {n: exchange.state.error(NAMES.index(n)).copy() for n in SMALL}


def steps(exchange, count, first=0):
    """Results of some steps by step; no momentum, so a result is the mean or sum of what was sent."""
    return [run_step(exchange, gradients(first + i, exchange.transport.rank))[1] for i in range(count)]


def coded(function):
    """What a function returns on each of two ranks, whose exchange has made two steps."""

    def one_rank(exchange, rank):
        steps(exchange, 2)
        return function(exchange, rank)

    return on_ranks(2, one_rank, **CODED)


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.0},
        {"sparsity": 0.9, "rampup_begin_step": 9},
        {"sparsity": 0.25, "values": "float32", "indices": "uint16", "op": "sum"},
    ],
    ids=["sparsity 0", "warm-up", "dense sum"],
)
def test_dense_steps_and_sums_are_exact(options):
    ranks, begins = 8 if "op" in options else 2, "rampup_begin_step" in options

    def train(exchange, rank):
        assert begins or exchange.ways() == "dense sum"
        return steps(exchange, 3)

    small, exact = (on_ranks(ranks, train, small=small, **options) for small in ("int8", "float32"))
    same_results(exact[0], small[0])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_are_coded_in_float32_or_not_at_all(dtype):
    def one_rank(exchange, rank):
        return run_step(exchange, gradients(0, rank, dtype=dtype))[1], exchange.state.error(1).copy()

    out = on_ranks(2, one_rank, dtype=dtype, **CODED)
    exact = np.mean([gradient(0, r, 1, 8, dtype).astype(np.float64) for r in range(2)], axis=0)
    if dtype == "float64":
        assert out[0][1].size == 0
        np.testing.assert_allclose(out[0][0][1], exact, rtol=1e-15)
    else:
        assert out[0][1].dtype == np.float32
        assert out[0][1].any()
        np.testing.assert_allclose(out[0][0][1], exact, atol=0.4 / 254)


@pytest.mark.filterwarnings("ignore:NaN, infinity")
def test_gradient_and_residual_that_add_up_to_infinity_refuse_the_step():
    def one_rank(exchange, rank):
        state = exchange.state_dict()
        state["parameters"]["conv.bias"]["error"][2] = 3e38
        exchange.load_state_dict(state)
        given = gradients(2, rank)
        given[NAMES.index("conv.bias")][2] = 3e38
        return run_step(exchange, given)[0], exchange.state.error(1)[2]

    assert coded(one_rank) == [(True, np.float32(3e38))] * 2


def test_a_failed_step_leaves_the_residual_as_it_was():
    def one_rank(exchange, rank):
        before, given = errors(exchange), gradients(2, rank)
        for i in reversed(range(1, len(given))):
            exchange.submit(i, given[i], given[i].copy())
        fails = exchange.fail if rank == 1 else lambda *_: exchange.submit(0, given[0], given[0].copy())
        with pytest.raises(DGCError, match="enough"):
            fails(LayoutError("enough"), 0) or exchange.finish()
        return before, errors(exchange)

    for before, after in coded(one_rank):
        np.testing.assert_equal(after, before)


def test_reset_forgets_and_a_state_without_residuals_is_accepted():
    def one_rank(exchange, rank):
        assert exchange.state.residual_norm() > 0
        old = exchange.state_dict()
        for name in SMALL:
            assert old["parameters"][name].pop("error").any()
        exchange.load_state_dict(old)
        found = [errors(exchange), exchange.state_dict()["parameters"]["fc.bias"].keys()]
        steps(exchange, 1)
        exchange.reset()
        return [*found, errors(exchange), exchange.state.residual_norm()]

    for loaded, keys, after_reset, norm in coded(one_rank):
        assert set(keys) == {"u"}
        assert not any(e.any() for e in [*loaded.values(), *after_reset.values()])
        assert norm == 0


def test_what_is_owed_is_sent_by_the_first_step_that_codes_nothing():
    def one_rank(exchange, rank):
        owed, exact = errors(exchange), make_exchange(exchange.transport, **{**CODED, "small": "float32"})
        exact.load_state_dict(exchange.state_dict())
        return owed, steps(exact, 2, first=2), errors(exact), exact.state_dict()["parameters"]["fc.bias"].keys()

    out = coded(one_rank)
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


def test_a_residual_of_a_tensor_that_travels_exactly_is_refused():
    def one_rank(exchange, rank):
        with pytest.raises(LayoutError, match=r"'fc.bias' is sent exactly here.*exclude"):
            make_exchange(exchange.transport, **CODED, exclude="fc.bias").load_state_dict(exchange.state_dict())

    coded(one_rank)


@pytest.mark.parametrize("case", [Case("qsgd"), Case("onebit"), Case("topk", {"sparsity": 0.9})], ids=str)
def test_every_compressor_can_have_them_coded(case):
    shapes = {"w": (40, 40), "b": (50,)}
    (results, exchange), (_, other) = train(2, 3, case, shapes=shapes, small="int8")
    came = sum(gradient(s, r, 1, 50).astype(np.float64) for s in range(3) for r in range(2))
    sent = 2 * sum(each[1].astype(np.float64) for each in results)
    np.testing.assert_allclose(sent + exchange.state.error(1) + other.state.error(1), came, atol=1e-5)
    stats = exchange.stats
    assert stats.last.small_bytes == 8 + 56  # a scale and 50 codes, each padded to 8 bytes
    assert stats.as_dict()["total"]["small_bytes"] == 3 * stats.last.small_bytes
