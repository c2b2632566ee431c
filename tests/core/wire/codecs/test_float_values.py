"""float16 with its scale, and bfloat16: rounding, range, and what is no number."""

from __future__ import annotations

import numpy as np
import pytest
from codec_tools import read_back

from dgc.core.codecs import value_codec
from dgc.errors import WireError

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("exponent", [-164, 114, 2**31 - 1, -(2**31)])
def test_float16_refuses_an_impossible_scale(exponent):
    block = np.zeros(16, np.uint8)
    block[:4].view("<i4")[0] = exponent
    with pytest.raises(WireError, match=f"exponent is {exponent}, it must be in -163..113"):
        value_codec("float16").decode(block, 2, np.array([0, 2]))


def test_float16_uses_the_top_of_its_range():
    for largest in (1e-40, 1e-6, 0.9999, 1.0, 65_504.0, LARGEST):
        values = np.array([largest, -largest / 3], np.float32)
        block = np.empty(16, np.uint8)
        value_codec("float16").encode(values, np.array([0, 2]), block)
        halves = np.abs(block[8:12].view("<f2").astype(np.float64))
        assert 2.0**14 <= halves[0] <= 2.0**15
        assert 2.0**12 < halves[1] < 2.0**14


def test_float16_of_tiny_gradients_is_as_good_as_of_large_ones():
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    bounds = np.array([0, 1000])
    codec = value_codec("float16")
    reference = read_back(codec, values, bounds)
    for power in (-100, -60, -24, 20, 100):
        scale = np.float32(2.0**power)
        np.testing.assert_array_equal(read_back(codec, values * scale, bounds), reference * scale)


def test_bfloat16_is_the_nearest_with_ties_to_even():
    upper = np.arange(1 << 15, dtype=np.uint32)
    upper = upper[upper < 0x7F7F]  # all finite numbers but the last, whose upper neighbour is infinity
    below = (upper << 16).view(np.float32).astype(np.float64)
    above = ((upper + 1) << 16).view(np.float32).astype(np.float64)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = ((upper << 16) | np.uint32(lower)).view(np.float32)
        gap_below, gap_above = values - below, above - values
        tie = np.where(upper % 2 == 0, below, above)
        nearest = np.select([gap_below < gap_above, gap_below > gap_above], [below, above], tie)
        decoded = read_back(value_codec("bfloat16"), values, np.array([0, values.size]))
        np.testing.assert_array_equal(decoded, nearest)
        mirrored = read_back(value_codec("bfloat16"), -values, np.array([0, values.size]))
        np.testing.assert_array_equal(mirrored, -nearest)


def test_bfloat16_keeps_every_nan_a_nan_and_the_largest_finite():
    special = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(read_back(value_codec("bfloat16"), special, np.array([0, 5]))).all()
    largest = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000], np.uint32).view(np.float32)
    decoded = read_back(value_codec("bfloat16"), largest, np.array([0, 3]))
    assert decoded.view(np.uint32).tolist() == [0x7F7F0000, 0xFF7F0000, 0x7F800000]
