"""The default codecs write and read the same bytes as NumPy does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgc.core.codecs import Float16Values, Uint16Indices, _times_power_of_two

CODEC, BOUNDS = Float16Values(), np.array([0], np.int64)


def encoded(values):
    out = np.full(CODEC.max_bytes(values.size, 0) + 8, 7, np.uint8)
    assert CODEC.encode(values, BOUNDS, out) == out.size - 8
    return out


def decoded(data, count):
    return CODEC.decode(data, count, BOUNDS)[0].view(np.uint32)


def check(values):
    halves, exponent = CODEC._scale_down(values)
    wanted = np.zeros(CODEC.max_bytes(values.size, 0) + 8, np.uint8)
    wanted[:4].view(np.int32)[0] = exponent
    wanted[8 : 8 + 2 * values.size] = halves.view(np.uint8)
    wanted[-8:] = 7
    np.testing.assert_array_equal(encoded(values), wanted)
    read = _times_power_of_two(halves.astype(np.float32), exponent)
    np.testing.assert_array_equal(decoded(wanted, values.size), read.view(np.uint32))


@settings(max_examples=300, deadline=None)
@given(arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_any_float32(values):
    check(values)


@pytest.mark.parametrize("scale", [2.0**e for e in (-149, -140, -126, -112, -98, -30, 0, 30, 98, 99, 111, 112)])
def test_every_half_its_ties_and_its_neighbours(scale):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    around = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))]
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate([halves, ties, *around]) / np.float32(65536) * np.float32(scale)
    check(np.concatenate([values, -values]))


def test_every_half_is_read_alike_infinities_and_nans_too():
    data = np.zeros(8 + 2 * 65536, np.uint8)
    data[8:] = np.arange(65536, dtype=np.uint16).view(np.uint8)
    for exponent in (-163, -127, -126, -20, 0, 113):
        data[:4].view(np.int32)[0] = exponent
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            wanted = np.ldexp(data[8:].view(np.float16).astype(np.float64), exponent).astype(np.float32)
        got = decoded(data, 65536).view(np.float32)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 2**32), st.floats(0, 0.3))
def test_positions(n, seed, density):
    positions = np.flatnonzero(np.random.default_rng(seed).random(n) < density)
    codec = Uint16Indices()
    out = np.full(codec.max_bytes(n, positions.size) + 8, 7, np.uint8)
    assert codec.encode(positions, n, out) == out.size - 8
    tiles = -(-n // 65536)
    edges = np.searchsorted(positions, np.arange(tiles + 1) * 65536)
    table, k = (4 * tiles + 7) // 8 * 8, positions.size
    wanted = np.zeros_like(out)
    wanted[: 4 * tiles].view(np.uint32)[...] = np.diff(edges)
    wanted[table : table + 2 * k].view(np.uint16)[...] = positions & 0xFFFF
    wanted[-8:] = 7
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(codec.decode(out, n, k)[0], positions)
