"""Entries of several ranks added up, against a sum that is made place by place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc.core.kernels.cpu import BLOCK, add_up


def by_place(entries, factor):
    """The sums as a dense result would hold them: from zero, in rank order."""
    places = np.unique(np.concatenate([positions for positions, _ in entries]))
    sums = np.zeros(places.size, np.float32)
    for positions, values in entries:
        sums[np.searchsorted(places, positions)] += values * np.float32(factor)
    return places, sums


@st.composite
def ranks(draw):
    size = draw(st.sampled_from([1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK]))
    entries = []
    for rank in range(draw(st.integers(1, 5))):
        generator = np.random.default_rng(draw(st.integers(0, 2**32)) + rank)
        count = draw(st.integers(0, min(size, 300)))
        positions = np.sort(generator.choice(size, count, replace=False))
        entries.append((positions, generator.standard_normal(count).astype(np.float32)))
    return entries


@given(entries=ranks(), factor=st.sampled_from([1.0, 0.5, 1 / 3]))
def test_equals_the_sum_at_each_place(entries, factor):
    positions, sums = add_up(entries, factor)
    places, expected = by_place(entries, factor)
    assert positions.dtype == np.int64
    assert sums.dtype == np.float32
    np.testing.assert_array_equal(positions, places)
    assert sums.tobytes() == expected.tobytes()


def test_order_is_that_of_the_ranks():
    place, one = np.array([7]), np.float32([1])
    entries = [(place, one), (place, np.float32([2**24])), (place, -np.float32([2**24]))]
    assert add_up(entries, 1.0)[1] == 0  # 1 + 2^24 loses the 1
    assert add_up(entries[::-1], 1.0)[1] == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
def test_values_that_are_none(value):
    for ranks in (1, 2):
        _, sums = add_up([(np.array([3]), np.float32([value]))] * ranks, 1.0)
        expected = np.float32(0) + np.float32(value) * np.float32(1)
        assert np.array_equal(sums, [expected], equal_nan=True)
        assert not np.signbit(sums[0]) or np.isnan(value)
