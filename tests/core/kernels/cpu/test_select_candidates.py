"""Picking the k largest of candidates in runs, and the arrays that passes borrow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc.core.kernels import sweep as module
from dgc.core.kernels.reference import top_k
from dgc.core.kernels.sweep import (
    ENTRIES,
    FIRST_CHUNK,
    INTEGERS,
    LENGTH,
    OUT,
    REALS,
    UNFINISHED,
    USED,
    Workspace,
    kth_key,
    write_largest,
)
from dgc.core.kernels.threshold import new_thresholds


def in_runs(values, ends):
    """The values as runs with gaps between them, where garbage lies: (bits, starts, counts, positions, values)."""
    cuts = [0, *sorted(ends), len(values)]
    counts = np.diff(cuts)
    starts = np.cumsum([3 + c for c in counts]) - counts
    room = np.full(int(starts[-1] + counts[-1]) + 3, np.nan, values.dtype)
    positions = np.full(room.size, -1, np.int32)
    for at, count, begin in zip(starts, counts, cuts, strict=False):
        room[at : at + count] = values[begin : begin + count]
        positions[at : at + count] = np.arange(begin, begin + count)
    return room.view(np.int32 if values.itemsize == 4 else np.int64), starts, counts, positions, room


def picked(values, k, ends=()):
    """Positions and values of the k largest, by the kernels' functions."""
    bits, starts, counts, positions, room = in_runs(values, ends)
    key, ties = kth_key(bits, starts, counts, 0, len(starts), len(values), k)
    assert key == np.sort(np.abs(values).view(bits.dtype))[-k]
    out, out_values = np.full(k + 2, -7, np.int64), np.zeros(k + 2, values.dtype)
    write_largest(positions, room, bits, starts, counts, 0, len(starts), key, ties, k, out, out_values, 1)
    assert out[0] == out[-1] == -7
    return out[1:-1], out_values[1:-1]


def check(values, k, ends=()):
    positions, found = picked(values, k, ends)
    np.testing.assert_array_equal(positions, top_k(values, k))
    np.testing.assert_array_equal(found, values[positions])


FLOATS = st.sampled_from([1.0, -1.0, 1.5, 2.0, -3e38, 1e-45, 1e-30, 7.0, np.float32(1.0000001)])


@given(st.data(), st.lists(FLOATS, min_size=1, max_size=20), st.sampled_from(["float32", "float64"]))
def test_the_k_largest_of_any_runs(data, values, dtype):
    k = data.draw(st.integers(1, len(values)))
    ends = data.draw(st.lists(st.integers(0, len(values)), max_size=3))
    check(np.array(values, dtype), k, ends)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [64, 65, 5000])
@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3, 1.0, 30.0])
def test_many_candidates_near_and_far(dtype, n, spread):
    """All equal, all but equal, and far apart."""
    rng = np.random.default_rng(n)
    magnitudes = np.clip(np.exp(spread * rng.standard_normal(n)), 1e-37, 3e38)
    values = magnitudes.astype(dtype) * rng.choice([-1, 1], n).astype(dtype)
    for k in {1, 2, n // 3, n - 1, n}:
        check(values, k, (n // 5, n // 2))


def tables(lengths, ks):
    integers, reals = np.zeros((len(ks), INTEGERS), np.int64), np.zeros((len(ks), REALS))
    integers[:, LENGTH], integers[:, ENTRIES] = lengths, ks
    return integers, reals


def test_a_cold_bucket_is_divided_into_chunks_and_places():
    chunk = module.CHUNK
    integers, reals = tables([0, 1, chunk, chunk + 1], [0, 1, 5, 7])
    chunks, room, out, elements = module.prepare(integers, reals, new_thresholds(4), True, np.zeros(1, np.float32))
    assert integers[:, FIRST_CHUNK].tolist() == [0, 0, 1, 2]
    assert integers[:, OUT].tolist() == [0, 0, 1, 6]
    assert (chunks, out, elements) == (4, 13, 2 * chunk + 2)
    assert room > 0


def test_without_a_selection_nothing_is_picked():
    integers, reals = tables([100], [5])
    chunks, _, out, _ = module.prepare(integers, reals, np.empty((1, 0)), False, np.zeros(1, np.float32))
    assert (chunks, out) == (1, 0)
    assert np.isinf(reals[0, USED])


@pytest.mark.parametrize(
    ("taken", "nonfinite", "expected"),
    [([], [0], (False, 0, False)), ([3, 0, 4], [0, 0], (False, 7, False)), ([1], [0, 1], (False, 1, True))],
)
def test_the_outcome_is_summed_up(taken, nonfinite, expected):
    assert module.outcome(np.array(taken, np.int64), np.array(nonfinite)) == expected


def test_one_unfinished_segment_is_enough():
    assert module.outcome(np.array([2, UNFINISHED, 2]), np.zeros(1, np.int64))[0]


def test_arrays_given_back_are_borrowed_again_and_grow():
    workspace, kind = Workspace(), np.dtype(np.float32)
    first = workspace.borrow(kind, 2, 3, 4, 10)
    other = workspace.borrow(kind, 2, 3, 4, 10)
    assert other is not first
    workspace.give_back(kind, first)
    assert workspace.borrow(kind, 1, 3, 4, 20) is first
    workspace.give_back(kind, first)
    grown = workspace.borrow(kind, 3, 1, 1, 1)
    assert grown is not first
    assert all(now >= before for now, before in zip(grown.sizes, first.sizes, strict=True))
    assert workspace.borrow(np.dtype(np.float64), 1, 1, 1, 1).values.dtype == np.float64
