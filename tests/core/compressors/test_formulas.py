"""Each compressor against its paper's formula, written down once more and naively."""

import math

import loops_numpy
import numpy as np
import pytest
from contract_tools import Alone, Case, train

from dgc.core.compressors import SparseValues
from dgc.core.compressors.build import make_config
from dgc.core.compressors.quantizers import numba_loops
from dgc.core.compressors.quantizers.terngrad import Terngrad
from dgc.errors import WireError


def sent(alone, x, **info):
    message, count, used = alone.encode(x, **info)
    decoded = alone.algorithm.decode(message, count, alone.spec)
    return decoded, count, used


def test_strom_sends_the_threshold_and_its_sign_only():
    alone = Alone(Case("strom", {"threshold": 0.5, "max_density": 1.0}), {"w": (4, 4)})
    x = alone.flat({"w": [0.5, 0.51, -0.5, -0.51, 7, -7, 0, 0.1, *[0] * 8]})
    decoded, count, used = sent(alone, x)
    np.testing.assert_array_equal(decoded.positions, [1, 3, 4, 5])
    np.testing.assert_array_equal(decoded.values, np.float32([0.5, -0.5, 0.5, -0.5]))
    assert (count, used) == (4, 16)
    message, _, _ = alone.encode(x)
    np.testing.assert_array_equal(message[:16].view("<u4"), [1 << 1 | 1, 3 << 1, 4 << 1 | 1, 5 << 1])


def test_strom_sends_the_largest_first_when_there_are_too_many():
    alone = Alone(Case("strom", {"threshold": 0.1, "max_density": 0.25}), {"w": (4, 4)})
    x = alone.flat({"w": np.linspace(1, 2, 16) * np.tile([1, -1], 8)})
    decoded, count, _ = sent(alone, x)
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
    with pytest.raises(WireError, match=r"ascending|between tensors"):
        alone.algorithm.decode(message, len(positions), alone.spec)
    message[:4] = np.array([19 << 1], "<u4").view(np.uint8)
    assert alone.algorithm.decode(message, 1, alone.spec).positions == [19]


@pytest.mark.parametrize(
    ("case", "at", "byte"),
    [
        (Case("terngrad"), 4, 243),  # more than five ternary numbers can be
        (Case("terngrad"), 3, 0xFF),  # the scale becomes negative or no number
        (Case("qsgd"), 16, 0xFF),  # level 15 of 0 to 14
        (Case("qsgd", {"bits": 8}), 16, 0xFF),
        (Case("adacomp", {"fc_bin": 50}), 8, 0x3E),  # index 62 in a bin of 50
        (Case("adacomp", {"fc_bin": 50}), 8, 0x3F),  # the mark of an empty bin that is not its last unit
        (Case("dryden"), 3, 0x7F),  # a mean that is no number
        (Case("onebit"), 2, 0xFF),
        (Case("dorefa"), 3, 0xFF),
    ],
    ids=str,
)
def test_codes_that_no_sender_writes_are_refused(case, at, byte):
    alone = Alone(case, {"w": (40, 40)})
    message, count, _ = alone.encode(alone.random())
    alone.decode(message, count)
    message[at] = byte
    if at == 3 and byte == 0x7F:
        message[2] = 0xFF
    if case.name == "onebit":
        message[3] = 0x7F
    with pytest.raises(WireError):
        alone.algorithm.decode(message, count, alone.spec)


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "dorefa", "onebit", "dryden", "adacomp"])
def test_numbers_beyond_float32_arrive_as_its_largest(name):
    alone = Alone(Case(name), {"w": (40, 40)}, dtype="float64")
    x = alone.flat({"w": 1e300 * np.where(np.arange(1600) % 2, 1, -1)})
    with np.errstate(over="ignore"):
        message, count, _ = alone.encode(x)
    decoded = alone.decode(message, count)
    assert np.isfinite(decoded).all()
    assert (np.sign(decoded) * np.sign(x) >= 0).all()


def test_what_is_left_over_in_a_message_is_zero():
    """Nothing of the step before, or of other memory, travels in the room that a message does not need."""
    from contract_tools import gradients, make_exchange
    from exchange_tools import run_step

    from dgc.core.wire import HEADER_BYTES
    from dgc.transport.local import run_ranks

    def one_rank(transport):
        exchange = make_exchange(transport, Case("strom", {"threshold": 0.2, "max_density": 0.5}))
        run_step(exchange, gradients(0, transport.rank))
        count = round(exchange.stats.last.density * exchange.layout.sparse_numel)
        bucket = exchange._buckets[0]
        spec = bucket.encoder.plan_at(1.0).payload_bytes
        tails = [bucket._buffers.sender._gathered[0, HEADER_BYTES + 4 * count : HEADER_BYTES + spec].copy()]
        run_step(exchange, [np.zeros_like(g) for g in gradients(1, transport.rank)])
        count = round(exchange.stats.last.density * exchange.layout.sparse_numel)
        tails.append(bucket._buffers.sender._gathered[0, HEADER_BYTES + 4 * count : HEADER_BYTES + spec].copy())
        exchange.close()
        return tails

    for tail in run_ranks(1, one_rank)[0]:
        assert tail.size > 0
        assert not tail.any()


def test_strom_drains_a_large_residual_step_by_step():
    runs = train(1, 3, Case("strom", {"threshold": 0.01, "max_density": 1.0}), shapes={"w": (64, 64)})
    _, exchange = runs[0]
    assert np.abs(exchange.state.residual(0)).max() > 0.01


@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_dryden_sends_a_share_of_either_sign_as_its_mean(density):
    alone = Alone(Case("dryden", {"sparsity": 1 - density}), {"w": (8, 10)})
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.uniform(0.1, 1, 60), -rng.uniform(0.1, 1, 20)])
    rng.shuffle(values)
    x = alone.flat({"w": values})
    decoded, count, _ = sent(alone, x)
    up, down = int(60 * density), int(20 * density)
    assert count == up + down
    for sign, k in ((1, up), (-1, down)):
        mine = np.sort(sign * x)[::-1][:k]
        chosen = decoded.positions[np.sign(decoded.values) == sign]
        np.testing.assert_array_equal(np.sort(sign * x[chosen])[::-1], mine)
        np.testing.assert_allclose(decoded.values[np.sign(decoded.values) == sign], sign * mine.mean(), rtol=1e-6)


def test_dryden_with_one_sign_only():
    alone = Alone(Case("dryden"), {"w": (8, 10)})
    decoded, count, _ = sent(alone, alone.flat({"w": np.arange(1, 81)}))
    assert count == 1
    np.testing.assert_array_equal(decoded.positions, [79])
    assert decoded.values[0] == 80


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
        decoded, count, _ = sent(alone, x, increment=dw)
        positions, values = naive_adacomp(x[:n], dw[:n], length)
        np.testing.assert_array_equal(decoded.positions, positions)
        np.testing.assert_allclose(decoded.values, values, rtol=1e-6)
        assert count == len(positions)


def test_adacomp_without_room_skips_other_bins_in_other_steps():
    alone = Alone(Case("adacomp", {"conv_bin": 10, "entries_per_bin": 2.0}), {"w": (20, 10, 5)})
    x = alone.flat({"w": np.ones(1000)})
    served = []
    for step in range(40):
        decoded, count, used = sent(alone, x, step=step)
        assert used <= alone.algorithm.max_bytes(alone.spec)
        assert count == decoded.positions.size
        served.append(np.unique(decoded.positions // 10))
    assert all(0 < len(s) < 100 for s in served)
    assert len(np.unique(np.concatenate(served))) > 60


@pytest.mark.parametrize("means", ["column", "row", "tensor"])
def test_onebit_takes_the_means_of_either_sign(means):
    alone = Alone(Case("onebit", {"means": means}), {"w": (6, 4, 2)})
    x = alone.random()
    decoded, _, used = sent(alone, x)
    matrix, read = x[:48].reshape(6, 8), decoded.values[0].reshape(6, 8)
    groups = {
        "column": [(slice(None), c) for c in range(8)],
        "row": [(r, slice(None)) for r in range(6)],
        "tensor": [(slice(None), slice(None))],
    }[means]
    for group in groups:
        part, got = matrix[group], read[group]
        for members in (part >= 0, part < 0):
            np.testing.assert_allclose(got[members], part[members].mean() if members.any() else [], rtol=1e-6)
    assert used == 8 * len(groups) + 8  # 6 bytes of bits, padded to 8


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_rounds_to_neighbouring_levels_of_each_bucket(norm, bits):
    alone = Alone(Case("qsgd", {"norm": norm, "bits": bits, "bucket_size": 100}), {"w": (10, 33)})
    x, s = alone.random(), 2 ** (bits - 1) - 1
    decoded = alone.roundtrip(x)[:330]
    for start in range(0, 330, 100):
        part, got = x[start : min(start + 100, 330)], decoded[start : start + 100]
        scale = np.linalg.norm(part) if norm == "l2" else np.abs(part).max()
        levels = got / scale * s
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
        assert (np.abs(np.round(levels) - part / scale * s) < 1 + 1e-4).all()
        assert (np.sign(got) * np.sign(part) >= 0).all()


def test_qsgd_has_the_variance_of_the_paper():
    """E ||Q(x) - x||² <= min(d/s², sqrt(d)/s) ||x||², Lemma 3.1."""
    for bits in (2, 4, 8):
        alone = Alone(Case("qsgd", {"bits": bits}), {"w": (16, 32)})
        x, s, d = alone.random(), 2 ** (bits - 1) - 1, 512
        errors = [((alone.roundtrip(x, step=i) - x) ** 2).sum() for i in range(50)]
        assert np.mean(errors) <= 1.05 * min(d / s**2, np.sqrt(d) / s) * (x**2).sum()
        assert np.mean(errors) > 0


def test_elias_codes_say_what_fixed_ones_say():
    shapes = {"a": (30, 30), "b": (7, 11)}
    for bits in (2, 4, 8):
        fixed = Alone(Case("qsgd", {"bits": bits}), shapes)
        elias = Alone(Case("qsgd", {"bits": bits, "coding": "elias"}), shapes)
        x = fixed.random()
        np.testing.assert_array_equal(fixed.roundtrip(x), elias.roundtrip(x))
        assert elias.encode(x)[2] <= elias.algorithm.max_bytes(elias.spec)


def test_elias_codes_of_the_worst_case_fit():
    alone = Alone(Case("qsgd", {"bits": 8, "coding": "elias", "norm": "max"}), {"a": (64, 64)})
    x = alone.flat({"a": np.ones(4096)})
    np.testing.assert_array_equal(alone.roundtrip(x), x)


def test_terngrad_clips_and_shares_its_scaler():
    alone = Alone(Case("terngrad"), {"w": (50, 50)})
    x = alone.random()
    x[7] = 100
    deviation = x[:2500].std(dtype=np.float64)
    assert alone.algorithm.prepare(x, alone.spec)[0] == pytest.approx(2.5 * deviation, rel=1e-5)
    decoded = alone.roundtrip(x, shared=np.array([3.0]))
    assert set(np.unique(decoded)) <= {-3.0, 0.0, 3.0}
    assert (np.sign(decoded) * np.sign(x) >= 0).all()
    draws = np.array([alone.roundtrip(x, step=s, shared=np.array([3.0 * deviation]))[7] for s in range(3000)])
    assert draws.mean() == pytest.approx(2.5 * deviation, rel=0.05)


def test_terngrad_does_not_clip_a_constant():
    alone = Alone(Case("terngrad"), {"w": (50, 50)})
    x = alone.flat({"w": -0.5})
    np.testing.assert_array_equal(alone.roundtrip(x), x)


def test_all_ranks_use_the_largest_scaler():
    runs = train(3, 1, Case("terngrad", {"clip_factor": None}), shapes={"w": (40, 40)})
    from contract_tools import gradients

    largest = max(np.abs(gradients(0, r, {"w": (40, 40)})[0]).max() for r in range(3))
    counts = runs[0][0][0][0] * 3 / np.float32(largest)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-5)
    assert np.abs(counts).max() <= 3.0001


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_dorefa_has_levels_at_odd_multiples(bits):
    alone = Alone(Case("dorefa", {"bits": bits}), {"w": (50, 50)})
    x = alone.random()
    largest, top = np.abs(x).max(), 2**bits - 1
    decoded = alone.roundtrip(x)[:2500]
    numbers = decoded / largest * top
    np.testing.assert_allclose(numbers, 2 * np.round((numbers - 1) / 2) + 1, atol=1e-4)
    assert (np.abs(decoded - x[:2500]) <= 2 * largest / top * 1.0001).all()
    zeros = alone.flat({"w": [1, *[0] * 2499]})
    np.testing.assert_allclose(np.abs(alone.roundtrip(zeros)[1:2500]), 1 / top, rtol=1e-6)


def test_a_global_threshold_follows_the_last_step_over_all_tensors():
    case = Case("topk", {"threshold": "global", "sparsity": 0.9, "headroom": 5.0, "values": "float32"})
    shapes = {"small": (40, 50), "large": (40, 50)}
    alone = Alone(case, shapes)
    rng = np.random.default_rng(4)
    x = alone.flat({"small": rng.standard_normal(2000) * 0.1, "large": rng.standard_normal(2000)})
    alone.encode(x)
    alone.algorithm.finish(alone.spec, alone.control, refused=False)
    threshold = alone.control[0, 0]
    assert threshold == np.sort(np.abs(x))[3600 - 1]
    assert (alone.control[:, 0] == threshold).all()
    decoded, count, _ = sent(alone, x, step=1)
    assert isinstance(decoded, SparseValues)
    np.testing.assert_array_equal(decoded.positions, np.flatnonzero(np.abs(x) > threshold))
    assert count == 400
    _, large = alone.tensors if alone.tensors[0].name == "small" else alone.tensors[::-1]
    inside = (decoded.positions >= large.offset) & (decoded.positions < large.offset + large.n)
    assert inside.sum() > 0.99 * count, "almost all entries come from the tensor with the larger ones"


def test_a_refused_step_leaves_the_global_threshold():
    alone = Alone(Case("topk", {"threshold": "global"}), {"w": (40, 50)})
    alone.encode(alone.random())
    alone.algorithm.finish(alone.spec, alone.control, refused=True)
    assert np.isnan(alone.control[:, 0]).all()


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


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, -7.7])
@pytest.mark.parametrize("size", [10, 1000, 4099])
def test_terngrad_sends_a_constant_float64_tensor_as_it_is(value, size):
    """Rounding leaves a deviation of some 1e-17; clipping to 2.5 of it would send nothing."""
    algorithm = Terngrad(make_config({}, algorithm="terngrad"))
    largest, cut = algorithm._extent(np.full(size, value))
    assert largest == abs(value)
    assert cut == math.inf
    assert algorithm._extent(np.array([0.0, 1.0] * 50))[1] == 1.25


@pytest.mark.parametrize("module", [numba_loops, loops_numpy], ids=["numba", "numpy"])
def test_the_largest_float_comes_back_finite(module):
    largest = np.finfo(np.float32).max
    codes, out = np.array([0, 127, 254], np.uint8), np.empty(3, np.float32)
    assert module.scale_signed(codes, np.array([largest]), 3, 127, out)
    np.testing.assert_allclose(out, [-largest, 0, largest], rtol=1e-6)
