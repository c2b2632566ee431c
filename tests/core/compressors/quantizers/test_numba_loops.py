"""The Numba loops against the NumPy ones, byte for byte."""

import loops_numpy
import numpy as np
import pytest

from dgc.core import loops as numba_loops
from dgc.core.compressors.quantizers import magnitude_and_deviation, tiles_of

KEY = np.uint64(0xFEDCBA9876543210)
SIZES = [0, 1, 2, 5, 7, 8, 63, 64, 65, 511, 512, 513, 4999]
BOTH = (numba_loops, loops_numpy)
rng = np.random.default_rng(0)


def same(make):
    """What both implementations make of the same input."""
    ours, oracle = (make(module) for module in BOTH)
    for a, b in zip(ours, oracle, strict=True):
        np.testing.assert_array_equal(a, b)
    return ours


@pytest.mark.parametrize("n", SIZES)
def test_uniform_numbers(n):
    def make(module):
        out = np.empty(n)
        module.uniform(KEY, out)
        return (out,)

    (out,) = same(make)
    assert ((out >= 0) & (out < 1)).all()


def test_uniform_numbers_are_uniform_and_independent():
    out, other = np.empty(200_000), np.empty(200_000)
    numba_loops.uniform(KEY, out)
    numba_loops.uniform(KEY + np.uint64(1), other)
    counts, _ = np.histogram(out, 100, (0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # chi squared with 99 degrees of freedom: 150 is beyond 0.1 %
    for pair in ((out[1:], out[:-1]), (out, other)):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.01


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_packing(n, bits):
    codes = rng.integers(0, 2**bits, n).astype(np.uint8)

    def make(module):
        out, back = np.full(-(-n * bits // 8), 0xAA, np.uint8), np.empty(n, np.uint8)
        module.pack(codes, bits, out)
        module.unpack(out, bits, back)
        return out, back

    _, back = same(make)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("n", SIZES)
def test_trits(n):
    codes = rng.integers(0, 3, n).astype(np.uint8)

    def make(module):
        out, back = np.full(-(-n // 5), 0xAA, np.uint8), np.empty(n, np.uint8)
        module.pack_trits(codes, out)
        assert module.unpack_trits(out, back)
        return out, back

    _, back = same(make)
    np.testing.assert_array_equal(back, codes)


def test_a_byte_that_is_no_five_trits_is_noticed():
    for module in BOTH:
        codes = np.empty(5, np.uint8)
        assert module.unpack_trits(np.array([242], np.uint8), codes)
        np.testing.assert_array_equal(codes, 2)
        assert not module.unpack_trits(np.array([243], np.uint8), codes)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("limit", [np.inf, 0.8])
def test_rounding_to_signed_levels(n, levels, dtype, limit):
    x = rng.standard_normal(n).astype(dtype)
    group = 100
    scales = np.array([np.abs(x[i : i + group]).max() for i in range(0, n, group)], np.float32)
    scales[1:2] = 0

    def make(module):
        codes, out = np.empty(n, np.uint8), np.empty(n, np.float32)
        module.round_signed(x, scales, group, limit, levels, KEY, codes)
        assert module.scale_signed(codes, scales, group, levels, out)
        return codes, out

    _, out = same(make)
    unit = np.repeat(scales, group)[:n] / levels
    wanted = np.clip(x, -limit, limit) * (unit > 0)
    assert (np.abs(out - wanted) <= unit * 1.0001).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("levels", [1, 3, 255])
def test_rounding_within_a_span(n, levels):
    x = rng.uniform(-2, 2, n).astype(np.float32)

    def make(module):
        codes = np.empty(n, np.uint8)
        module.round_span(x, 2.0, levels, KEY, codes)
        return (codes,)

    (codes,) = same(make)
    assert (codes <= levels).all()
    assert (np.abs(codes * (4 / levels) - 2 - x) <= 4 / levels + 1e-6).all()


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 5, 1), (200, 3, 1), (1, 5, 7), (1, 1, 33), (1, 2, 5000), (3, 4, 5)], ids=str
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_means_of_either_sign(shape, dtype):
    x = rng.standard_normal(shape).astype(dtype)
    x.reshape(-1)[0] = 0

    def make(module):
        means, signs = np.empty((2, shape[1]), np.float32), np.empty(x.size, np.uint8)
        module.split_means(x, means, signs)
        return means, signs

    same(make)
    for module in BOTH:
        means, signs = np.empty((2, shape[1]), np.float32), np.empty(x.size, np.uint8)
        out = np.empty(shape, np.float32)
        module.split_means(x, means, signs)
        module.spread_means(signs, means, out)
        np.testing.assert_array_equal(signs, (x >= 0).reshape(-1))
        for c in range(shape[1]):
            column, read = x[:, c], out[:, c]
            for members in (column >= 0, column < 0):
                if members.any():
                    np.testing.assert_allclose(read[members], column[members].mean(dtype=np.float64), rtol=1e-6)
                else:
                    assert means[int(members is not None and (column < 0).all()), c] == 0


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("group", [50, 512])
def test_norms(n, dtype, group):
    x = rng.standard_normal(n).astype(dtype)
    for squared in (False, True):

        def make(module, squared=squared):
            out = np.empty(-(-n // group))
            module.norms(x, group, squared, out)
            return (out,)

        (found,) = same(make)
        wanted = np.linalg.norm(x[:group].astype(np.float64)) if squared else np.abs(x[:group]).max()
        assert found[0] == pytest.approx(wanted)


@pytest.mark.parametrize("n", [*SIZES[1:], 4096, 4097, 20_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_spread(n, dtype, mean):
    x = (mean + rng.standard_normal(n)).astype(dtype)

    def make(module):
        out = np.empty((tiles_of(n), 3))
        module.moments(x, out)
        return (out,)

    (found,) = same(make)
    largest, deviation = magnitude_and_deviation(found, n)
    assert largest == np.abs(x).max()
    assert deviation == pytest.approx(np.std(x, dtype=np.float64), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("levels", [1, 15, 255])
def test_levels_of_a_span(levels):
    codes = rng.integers(0, levels + 1, 300).astype(np.uint8)

    def make(module):
        out = np.empty(300, np.float32)
        module.scale_span(codes, np.float32(0.7), levels, out)
        return (out,)

    (out,) = same(make)
    np.testing.assert_allclose(out, (2.0 * codes - levels) / levels * 0.7, rtol=1e-6)


@pytest.mark.parametrize("module", [numba_loops, loops_numpy], ids=["numba", "numpy"])
def test_the_largest_float_comes_back_finite(module):
    largest = np.finfo(np.float32).max
    codes, out = np.array([0, 127, 254], np.uint8), np.empty(3, np.float32)
    assert module.scale_signed(codes, np.array([largest]), 3, 127, out)
    np.testing.assert_allclose(out, [-largest, 0, largest], rtol=1e-6)
