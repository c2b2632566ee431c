"""int8, int3, int2 and sign: groups with scales of their own."""

from __future__ import annotations

import numpy as np
import pytest
from codec_tools import read_back
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dgc.core.codecs import value_codec
from dgc.errors import WireError


@pytest.mark.parametrize("name", ["int8", "int3", "int2", "sign"])
@pytest.mark.parametrize("bounds", [[], [0], [0, 2], [0, 4], [1, 3], [0, 5, 3], [0, 2, 1, 3], [-1, 3]])
def test_bounds_that_do_not_cover_the_entries_are_refused(name, bounds):
    codec, bounds = value_codec(name), np.array(bounds, np.int64)
    for call in (
        lambda: codec.encode(np.ones(3, np.float32), bounds, np.empty(1000, np.uint8)),
        lambda: codec.decode(np.zeros(1000, np.uint8), 3, bounds),
    ):
        with pytest.raises(WireError, match="run from 0 to 3"):
            call()


@pytest.mark.parametrize(("name", "codes", "lowest"), [("int8", (3, 128), -128), ("int3", (0b100011, 0), -4)])
def test_the_code_that_is_never_written_is_refused(name, codes, lowest):
    block = np.zeros(16, np.uint8)
    block[:4].view("<f4")[0] = 1.0
    block[8:10] = codes
    with pytest.raises(WireError, match=f"{name}: an entry is {lowest},"):
        value_codec(name).decode(block, 2, np.array([0, 2]))


@pytest.mark.parametrize("name", ["int8", "int3"])
@given(groups=st.lists(arrays(np.float32, st.integers(0, 40), elements=st.floats(-1e6, 1e6, width=32)), max_size=5))
def test_integers_are_those_that_numpy_finds(name, groups):
    values = np.concatenate([np.empty(0, np.float32), *groups])
    codec, bounds = value_codec(name), np.cumsum([0, *map(len, groups)])
    levels = np.float32(2 ** (codec.bits - 1) - 1)
    expected = [np.empty(0, np.float32)]
    for group in groups:
        largest = np.abs(group).max(initial=np.float32(0))
        q = np.rint(group / (largest or np.float32(1)) * levels)
        expected.append(q / levels * largest)
    np.testing.assert_array_equal(read_back(codec, values, bounds), np.concatenate(expected))


def test_groups_have_scales_of_their_own():
    values = np.array([1000.0, -500.0, 0.001, -0.0005, 3.0], np.float32)
    bounds = np.array([0, 2, 2, 4, 5])
    np.testing.assert_allclose(read_back(value_codec("int8"), values, bounds), values, rtol=0.01)
    for name in ("int2", "sign"):
        np.testing.assert_array_equal(read_back(value_codec(name), values, bounds), values)


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        ([1.0, -3.0, 2.0, 10.0, -14.0], [2.0, -2.0, 2.0, 12.0, -12.0]),  # the mean magnitude is 6
        ([0.5, -0.5, 0.5], [0.5, -0.5, 0.5]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([3e38, -1e-30, 1e-30], [3e38, -1e-30, 1e-30]),
        ([2.0**-149, 0.0, 0.0, 0.0], [2.0**-149, 0.0, 0.0, 0.0]),
        ([3.4e38, 3.4e38], [3.4e38, 3.4e38]),
        ([-7.0], [-7.0]),
    ],
    ids=["two magnitudes", "all equal", "zeros", "an outlier", "subnormal", "a sum beyond float32", "one"],
)
def test_int2_is_one_of_two_magnitudes(values, decoded):
    got = read_back(value_codec("int2"), np.array(values, np.float32), np.array([0, len(values)]))
    np.testing.assert_array_equal(got, np.array(decoded, np.float32))


def test_sign_is_the_mean_of_each_sign():
    values = np.array([1.0, 3.0, -2.0, -6.0, 0.0, -1.0, -3.0], np.float32)
    decoded = read_back(value_codec("sign"), values, np.array([0, 5, 7]))
    np.testing.assert_array_equal(decoded, np.array([4 / 3, 4 / 3, -4.0, -4.0, 4 / 3, -2.0, -2.0], np.float32))


@pytest.mark.parametrize("name", ["int2", "sign"])
@given(
    groups=st.lists(arrays(np.float32, st.integers(0, 20), elements=st.floats(-100, 100, width=32)), max_size=6),
    broken=st.sampled_from([None, np.inf, np.nan]),
)
def test_two_means_are_those_that_numpy_finds(name, groups, broken):
    values = np.concatenate([np.empty(0, np.float32), *groups])
    if broken is not None and values.size:
        values[0] = broken
    bounds = np.cumsum([0, *map(len, groups)])
    expected = []
    for group in np.split(values, bounds[1:-1]):
        size = np.abs(group) if name == "int2" else group
        second = size > np.float32(size.mean(dtype=np.float64)) if group.size and name == "int2" else group < 0
        means = [size[part].mean(dtype=np.float64) if part.any() else 0.0 for part in (~second, second)]
        decoded = np.where(second, *means[::-1])
        expected.append(np.copysign(decoded, np.where(group < 0, -1, 1)) if name == "int2" else decoded)
    with np.errstate(over="ignore"):
        expected = np.concatenate([np.empty(0), *expected]).astype(np.float32)
    np.testing.assert_allclose(read_back(value_codec(name), values, bounds), expected, rtol=1e-6)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "large"), [("int8", 384 / 127), ("int3", 12 / 3)])
def test_a_group_of_integers_that_is_not_finite_reads_as_nan(name, large, broken):
    values = np.array([broken, large, 1.0, 2.0], np.float32)  # 384 is -128 where 8 bits are left of it, 12 is -4 of 3
    decoded = read_back(value_codec(name), values, np.array([0, 2, 4]))
    assert np.isnan(decoded[:2]).all()
    assert decoded[3] == 2.0
