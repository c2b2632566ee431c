"""The oracle itself, against the definitions: sorting, and the formulas of one entry at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dgc.core.kernels.base import HostMemory, MomentumRule, SegmentWork
from dgc.core.kernels.reference import ReferenceKernels, as_float, effective_gradient, top_k
from dgc.errors import LayoutError

FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -3e38])
VALUES = hnp.arrays(np.float32, st.integers(0, 12), elements=FEW)


@given(VALUES, st.integers(0, 14))
def test_top_k_is_what_sorting_gives(values, k):
    """By falling magnitude, then by position; zeros never."""
    order = sorted((i for i in range(len(values)) if values[i]), key=lambda i: (-abs(values[i]), i))
    chosen = top_k(values, k)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == sorted(order[:k])


@given(VALUES)
def test_bfloat16_comes_as_its_bits(values):
    words = values.view(np.uint32)
    np.testing.assert_array_equal(
        as_float((words >> 16).astype(np.uint16), np.dtype(np.float32)), (words & 0xFFFF0000).view(np.float32)
    )


def test_a_gradient_is_never_written_to():
    gradient = np.ones(3, np.float32)
    work = SegmentWork(gradient, np.full(3, 2.0, np.float32), 0, 3, 1, weight_decay=0.5, scale=4.0)
    assert effective_gradient(work, np.dtype(np.float32)).tolist() == [5, 5, 5]
    assert gradient.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("momentum", "nesterov", "u", "v"),
    [(0.0, False, 10, 101), (0.0, True, 10, 101), (0.5, False, 6, 106), (0.5, True, 6, 104)],
)
def test_momentum_by_its_formula(momentum, nesterov, u, v):
    """From u = 10, v = 100 and a gradient of 1; entries of other segments and padding stay."""
    us, vs = np.full(4, 10, np.float32), np.full(4, 100, np.float32)
    work = [SegmentWork(np.ones(1, np.float32), None, 2, 1, 1, momentum, nesterov)]
    assert not ReferenceKernels().accumulate(work, us, vs)
    assert us.tolist() == [10, 10, u, 10]
    assert vs.tolist() == [100, 100, v, 100]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_zero_and_is_met(bad):
    u, v = np.ones(2, np.float32), np.ones(2, np.float32)
    work = [SegmentWork(np.array([bad, 1], np.float32), None, 0, 2, 1, 0.5)]
    assert ReferenceKernels().accumulate(work, u, v)
    assert (u.tolist(), v.tolist()) == ([0.5, 1.5], [1.5, 2.5])
    assert ReferenceKernels().sums_of_squares([work[0].gradient, np.empty(0)]).tolist() == [1, 0]


def test_squares_are_summed_in_float64():
    """In float32 the sum would overflow."""
    assert HostMemory().sum_of_squares(np.full(2, 2e19, np.float32)) == pytest.approx(8e38)


def test_positions_count_from_the_beginning_of_the_bucket():
    u, v = np.zeros(10, np.float32), np.zeros(10, np.float32)
    work = [SegmentWork(np.float32([1, -3, 2]), None, o, 3, k) for o, k in ((0, 1), (4, 0), (7, 2))]
    found = ReferenceKernels().accumulate_and_select(work, u, v, np.empty((3, 0)))
    assert found.positions.tolist() == [1, 8, 9]
    assert found.values.tolist() == [-3, -3, 2]
    nothing = ReferenceKernels().accumulate_and_select([], u, v, np.empty((0, 0)))
    assert nothing.positions.size == nothing.values.size == 0


@pytest.mark.parametrize("masking", [True, False])
def test_a_mask_subtracts_and_clears(masking):
    u, v = np.arange(4.0), np.arange(4.0) + 10
    ReferenceKernels().take_out(u, v, np.array([1, 3]), np.array([11.0, 12.5]), masking=masking)
    assert v.tolist() == [10, 0, 12, 0.5]
    assert u.tolist() == ([0, 0, 2, 0] if masking else [0, 1, 2, 3])


def test_entries_reach_their_tensors_and_none_the_padding():
    results, offsets = [np.ones(3, np.float32), np.ones(0, np.float32), np.ones(2, np.float32)], np.array([0, 4, 4, 8])
    ReferenceKernels().scatter_add(results, offsets, np.array([0, 2, 5]), np.float32([1, 2, 3]), 0.5)
    assert [r.tolist() for r in results] == [[1.5, 1, 2], [], [1, 2.5]]
    with pytest.raises(LayoutError, match="padding between tensors"):
        ReferenceKernels().scatter_add(results, offsets, np.array([3]), np.float32([1]), 0.5)


@pytest.mark.parametrize(("nesterov", "expected"), [(False, 8), (True, 6)])
def test_a_dense_update_is_sgd_with_momentum(nesterov, expected):
    """u = 0.5 * 4 + 2 = 4 where the gradient is 1 + 0.5 * 2."""
    result, u = np.empty(1), np.full(1, 4.0)
    options = {"momentum": 0.5, "nesterov": nesterov, "weight_decay": 0.5, "scale": 2.0}
    ReferenceKernels().dense_update(result, np.ones(1), u, np.full(1, 2.0), MomentumRule(**options))
    assert (u, result) == (4, expected if not nesterov else 8)
