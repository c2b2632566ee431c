"""Sparsifying compressors against their papers' formulas, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case, gradients, on_ranks, train
from exchange_tools import run_step

from dgc.core.compressors import SparseValues
from dgc.core.message import HEADER_BYTES, unpack_header
from dgc.errors import WireError


def test_a_global_threshold_follows_the_last_step_over_all_tensors():
    case = Case("topk", {"threshold": "global", "sparsity": 0.9, "headroom": 5.0, "values": "float32"})
    shapes = {"small": (40, 50), "large": (40, 50)}
    alone = Alone(case, shapes)
    rng = np.random.default_rng(4)
    x = alone.flat({"small": rng.standard_normal(2000) * 0.1, "large": rng.standard_normal(2000)})
    alone.encode(x)
    alone.algorithm.finish(alone.spec, alone.thresholds, refused=False)
    threshold = alone.thresholds[0, 0]
    assert threshold == np.sort(np.abs(x))[3600 - 1]
    assert (alone.thresholds[:, 0] == threshold).all()
    decoded, count, _ = alone.sent(x, step=1)
    assert isinstance(decoded, SparseValues)
    np.testing.assert_array_equal(decoded.positions, np.flatnonzero(np.abs(x) > threshold))
    assert count == 400
    _, large = alone.tensors if alone.tensors[0].name == "small" else alone.tensors[::-1]
    inside = (decoded.positions >= large.offset) & (decoded.positions < large.offset + large.n)
    assert inside.sum() > 0.99 * count, "almost all entries come from the tensor with the larger ones"


def test_a_refused_step_leaves_the_global_threshold():
    alone = Alone(Case("topk", {"threshold": "global"}), {"w": (40, 50)})
    alone.encode(alone.random())
    alone.algorithm.finish(alone.spec, alone.thresholds, refused=True)
    assert np.isnan(alone.thresholds[:, 0]).all()


def test_a_global_threshold_keeps_the_share_over_steps():
    case = Case("topk", {"threshold": "global", "sparsity": 0.95})
    densities = []
    train(
        2,
        12,
        case,
        shapes={"a": (100, 100), "b": (50, 200), "c": (30, 30)},
        on_step=lambda rank, step, exchange, *rest: densities.append(exchange.stats.last.density),
        bucket_bytes=40_000,
    )
    assert 0.02 < np.mean(densities[8:]) < 0.08


def test_strom_sends_the_threshold_and_its_sign_only():
    alone = Alone(Case("strom", {"threshold": 0.5, "max_density": 1.0}), {"w": (4, 4)})
    x = alone.flat({"w": [0.5, 0.51, -0.5, -0.51, 7, -7, 0, 0.1, *[0] * 8]})
    decoded, count, used = alone.sent(x)
    np.testing.assert_array_equal(decoded.positions, [1, 3, 4, 5])
    np.testing.assert_array_equal(decoded.values, np.float32([0.5, -0.5, 0.5, -0.5]))
    assert (count, used) == (4, 16)
    message, _, _ = alone.encode(x)
    np.testing.assert_array_equal(message[:16].view("<u4"), [1 << 1 | 1, 3 << 1, 4 << 1 | 1, 5 << 1])


def test_strom_sends_the_largest_first_when_there_are_too_many():
    alone = Alone(Case("strom", {"threshold": 0.1, "max_density": 0.25}), {"w": (4, 4)})
    x = alone.flat({"w": np.linspace(1, 2, 16) * np.tile([1, -1], 8)})
    decoded, count, _ = alone.sent(x)
    assert count == 4
    np.testing.assert_array_equal(decoded.positions, [12, 13, 14, 15])


@pytest.mark.parametrize(
    "positions",
    [[20], [3, 3], [5, 4], [32 + 25], [1000], [2**31 - 1]],
    ids=["padding", "twice", "descending", "padding at the end", "beyond", "far beyond"],
)
def test_positions_that_no_sender_writes_are_refused(positions):
    alone = Alone(Case("strom", {"max_density": 1.0}), {"b": (5, 5), "a": (4, 5)})  # 20 and 25 of 32 elements each
    message = np.zeros(alone.algorithm.max_bytes(alone.spec), np.uint8)
    words = (np.array(positions, np.uint32) << np.uint32(1)).astype("<u4")
    message[: words.nbytes] = words.view(np.uint8)
    with pytest.raises(WireError, match=r"ascending|between tensors|the bucket from 0 to 63"):
        alone.algorithm.decode(message, len(positions), alone.spec)
    message[:4] = np.array([19 << 1], "<u4").view(np.uint8)
    assert alone.algorithm.decode(message, 1, alone.spec).positions == [19]


def test_what_is_left_over_in_a_message_is_zero():
    """Nothing of the step before, or of other memory, travels in the room that a message does not need."""

    def one_rank(exchange, rank):
        tails, gather = [], exchange.transport.allgather

        def watched(message, out):
            header = unpack_header(message, "rank 0")
            tails.append(message[HEADER_BYTES + 4 * header.count : HEADER_BYTES + header.payload_bytes].copy())
            gather(message, out)

        exchange.transport.allgather = watched
        run_step(exchange, gradients(0, rank))
        run_step(exchange, [np.zeros_like(g) for g in gradients(1, rank)])
        return tails

    (tails,) = on_ranks(1, Case("strom", {"threshold": 0.2, "max_density": 0.5}), one_rank)
    assert len(tails) == 2
    for tail in tails:
        assert tail.size > 0
        assert not tail.any()


@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_dryden_sends_a_share_of_either_sign_as_its_mean(density):
    alone = Alone(Case("dryden", {"sparsity": 1 - density}), {"w": (8, 10)})
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.uniform(0.1, 1, 60), -rng.uniform(0.1, 1, 20)])
    rng.shuffle(values)
    x = alone.flat({"w": values})
    decoded, count, _ = alone.sent(x)
    up, down = int(60 * density), int(20 * density)
    assert count == up + down
    for sign, k in ((1, up), (-1, down)):
        mine = np.sort(sign * x)[::-1][:k]
        chosen = decoded.positions[np.sign(decoded.values) == sign]
        np.testing.assert_array_equal(np.sort(sign * x[chosen])[::-1], mine)
        np.testing.assert_allclose(decoded.values[np.sign(decoded.values) == sign], sign * mine.mean(), rtol=1e-6)


def naive_adacomp(g, dw, length):
    h = g + dw
    tops = [np.abs(g[b : b + length]).max() for b in range(0, g.size, length)]
    scale = np.float32(np.mean(tops))
    positions = [i for i in range(g.size) if tops[i // length] > 0 and g[i] and abs(h[i]) >= tops[i // length]]
    return positions, np.float32([scale * np.sign(g[i]) for i in positions])


@pytest.mark.parametrize(("shape", "length"), [((10, 4, 3, 3), 50), ((40, 33), 500), ((3, 3), 500)])
def test_adacomp_follows_its_soft_threshold(shape, length):
    alone = Alone(Case("adacomp", {"entries_per_bin": 500.0}), {"w": shape})
    rng = np.random.default_rng(2)
    n = int(np.prod(shape))
    for step in range(5):
        x, dw = (alone.flat({"w": rng.standard_normal(n)}) for _ in range(2))
        if step == 1:
            x[: min(n, length)] = 0  # an empty bin
        if step == 2:
            dw = -x  # the gradient opposes the residual: nothing reaches the largest
        decoded, count, _ = alone.sent(x, increment=dw)
        positions, values = naive_adacomp(x[:n], dw[:n], length)
        np.testing.assert_array_equal(decoded.positions, positions)
        np.testing.assert_allclose(decoded.values, values, rtol=1e-6)
        assert count == len(positions)


def test_adacomp_without_room_skips_other_bins_in_other_steps():
    alone = Alone(Case("adacomp", {"conv_bin": 10, "entries_per_bin": 2.0}), {"w": (20, 10, 5)})
    x = alone.flat({"w": np.ones(1000)})
    served = []
    for step in range(40):
        decoded, count, used = alone.sent(x, step=step)
        assert used <= alone.algorithm.max_bytes(alone.spec)
        assert count == decoded.positions.size
        served.append(np.unique(decoded.positions // 10))
    assert all(0 < len(s) < 100 for s in served)
    assert len(np.unique(np.concatenate(served))) > 60
