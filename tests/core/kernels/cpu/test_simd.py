"""Vectors of Numba kernels, operation by operation, against NumPy; and counters that threads share."""

import threading

import numba
import numpy as np
import pytest

from dgc.core.kernels import simd
from dgc.core.kernels.simd import LANES


@numba.njit(error_model="numpy")
def arithmetic(a, b, out):
    for i in range(0, len(a), LANES):
        x = simd.add(simd.multiply(simd.load(a, i), simd.splat(b[0])), simd.load(b, i))
        simd.store(out, i, x)


@numba.njit(error_model="numpy")
def looks(a, key, masks):
    limit = simd.threshold(a, key)
    for i in range(0, len(a), LANES):
        masks[i // LANES] = simd.reaching(simd.load(a, i), limit)


@numba.njit(error_model="numpy")
def widen(words, bfloat, out):
    for i in range(0, len(words), LANES):
        simd.store(out, i, simd.load_bfloat(words, i) if bfloat else simd.load_half(words, i))


@numba.njit
def bits(masks, lowest, counts):
    for i in range(len(masks)):
        lowest[i], counts[i] = simd.lowest_bit(masks[i]), simd.count_bits(masks[i])


@numba.njit(nogil=True)
def count(counters, times, seen):
    for i in range(times):
        seen[i] = simd.fetch_add(counters, 1, 1)


def sample(dtype, n=4 * LANES):
    x = np.random.default_rng(3).standard_normal(n).astype(dtype)
    x[[0, 7, LANES, 2 * LANES + 1, n - 1]] = [np.nan, -np.inf, 0.0, -0.0, np.inf]
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_and_sums_are_rounded_one_by_one_at_any_place(dtype):
    """From an odd address too, and with nothing written beyond."""
    memory = np.full((3, 2 * LANES + 3), 7, dtype)
    a, b, out = (row[1:-2] for row in memory)
    rng = np.random.default_rng(1)
    a[:], b[:] = rng.standard_normal((2, 2 * LANES))
    arithmetic(a, b, out)
    np.testing.assert_array_equal(out, a * b[0] + b)
    assert (memory[:, [0, -2, -1]] == 7).all()


def test_a_float32_vector_is_widened_in_a_float64_array():
    a, b = np.random.default_rng(2).standard_normal((2, LANES)).astype(np.float32)
    out = np.empty(LANES, np.float64)
    arithmetic(a, b, out)
    np.testing.assert_array_equal(out, (a * b[0] + b).astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limit", [5e-45, 0.5, np.inf])
def test_looks_at_magnitudes(dtype, limit):
    x = sample(dtype)
    if limit < 1e-40:
        limit = np.finfo(dtype).smallest_subnormal
    key = int(np.array(limit, dtype).view(f"i{x.itemsize}"))
    masks = np.zeros(4, np.uint64)
    looks(x, key, masks)
    expected = (np.abs(x) >= np.array(limit, dtype)) | np.isnan(x)
    found = [bool(int(masks[i // LANES]) >> (i % LANES) & 1) for i in range(x.size)]
    assert found == expected.tolist()
    assert all(int(mask) < 2**LANES for mask in masks)


def test_all_halves_and_all_bfloats_are_widened_exactly():
    words, out = np.arange(2**16, dtype=np.uint16), np.empty(2**16, np.float32)
    widen(words, True, out)
    np.testing.assert_array_equal(out.view(np.uint32), words.astype(np.uint32) << 16)
    widen(words, False, out)
    expected = words.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(expected))


def test_bits_of_masks():
    masks = [1 << i for i in range(64)] + [2**64 - 1, 6, 2**63 + 2**10]
    lowest, counts = np.empty(len(masks), np.int64), np.empty(len(masks), np.int64)
    bits(np.array(masks, np.uint64), lowest, counts)
    assert lowest.tolist() == [*range(64), 0, 1, 10]
    assert counts.tolist() == [mask.bit_count() for mask in masks]


def test_no_number_is_drawn_twice():
    counters, times = np.array([5, 0, 5], np.int64), 50_000
    seen = np.empty((2, times), np.int64)
    threads = [threading.Thread(target=count, args=(counters, times, row)) for row in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.tolist() == [5, 2 * times, 5]
    assert np.array_equal(np.sort(seen, axis=None), np.arange(2 * times))


@pytest.mark.parametrize(("dtype", "of_bits"), [("float32", "int32"), ("float64", "int64")])
def test_bits_are_the_same_memory(dtype, of_bits):
    array = np.zeros(2, dtype)
    view = simd.bits_of(array)
    assert view.dtype == of_bits
    view[0] = 1
    assert array[0] == np.finfo(dtype).smallest_subnormal
