"""Compressors of few bits, and their loops, against the papers' formulas, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case, gradients, train

from dgc.core.kernels import loops

KEY = np.uint64(0xFEDCBA9876543210)
SIZES = [0, 1, 2, 5, 7, 8, 63, 64, 65, 511, 512, 513, 4999]
rng = np.random.default_rng(0)


# -- onebit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("means", ["column", "row", "tensor"])
@pytest.mark.parametrize("shape", [(6, 4, 2), (200, 3), (3, 700), (1, 1)], ids=str)
def test_onebit_takes_the_means_of_either_sign(shape, means):
    alone = Alone(Case("onebit", {"means": means}), {"w": shape})
    x = alone.random()
    x[0] = 0
    decoded, _, used = alone.sent(x)
    rows, n = shape[0], int(np.prod(shape))
    matrix, read = x[:n].reshape(rows, -1), decoded.values[0].reshape(rows, -1)
    groups = {
        "column": [(slice(None), c) for c in range(n // rows)],
        "row": [(r, slice(None)) for r in range(rows)],
        "tensor": [(slice(None), slice(None))],
    }[means]
    for group in groups:
        part, got = matrix[group], read[group]
        for members in (part >= 0, part < 0):
            wanted = part[members].mean(dtype=np.float64) if members.any() else 0
            np.testing.assert_allclose(got[members], wanted, rtol=1e-6)
    assert used == -(-(8 * len(groups) + -(-n // 8)) // 8) * 8


# -- qsgd ----------------------------------------------------------------------------------------------------------


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


# -- terngrad --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, -7.7, -0.5])
@pytest.mark.parametrize("size", [10, 1000, 4099])
def test_terngrad_does_not_clip_a_constant(value, size):
    """Rounding leaves a deviation of some 1e-17; clipping to 2.5 of it would send nothing."""
    alone = Alone(Case("terngrad"), {"w": (size, 1)})
    x = alone.flat({"w": value})
    np.testing.assert_array_equal(alone.roundtrip(x), x)


def test_all_ranks_use_the_largest_scaler():
    runs = train(3, 1, Case("terngrad", {"clip_factor": None}), shapes={"w": (40, 40)})
    largest = max(np.abs(gradients(0, r, {"w": (40, 40)})[0]).max() for r in range(3))
    counts = runs[0][0][0][0] * 3 / np.float32(largest)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-5)
    assert np.abs(counts).max() <= 3.0001


# -- dorefa ----------------------------------------------------------------------------------------------------------


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


# -- the loops -------------------------------------------------------------------------------------------------------


def test_random_numbers_are_uniform_and_independent():
    out, other = np.empty(200_000), np.empty(200_000)
    loops.uniform(KEY, out)
    loops.uniform(KEY + np.uint64(1), other)
    counts, _ = np.histogram(out, 100, (0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # chi squared with 99 degrees of freedom: 150 is beyond 0.1 %
    for pair in ((out[1:], out[:-1]), (out, other)):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.01


@pytest.mark.parametrize("n", [*SIZES, 2**17 + 3])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packing(n, bits):
    codes = rng.integers(0, 2**bits, n).astype(np.uint8)
    out, back = np.full(-(-n * bits // 8), 0xAA, np.uint8), np.empty(n, np.uint8)
    pack, unpack = loops.packing[bits]
    pack(codes, out)
    string = (codes[:, None] >> np.arange(bits) & 1).astype(np.uint8)
    np.testing.assert_array_equal(out, np.packbits(string.reshape(-1), bitorder="little"))
    unpack(out, back)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("n", SIZES)
def test_trits(n):
    codes = rng.integers(0, 3, n).astype(np.uint8)
    out, back = np.full(-(-n // 5), 0xAA, np.uint8), np.empty(n, np.uint8)
    loops.pack_trits(codes, out)
    np.testing.assert_array_equal(out, np.pad(codes, (0, -n % 5)).reshape(-1, 5) @ 3 ** np.arange(5))
    assert loops.unpack_trits(out, back)
    np.testing.assert_array_equal(back, codes)
