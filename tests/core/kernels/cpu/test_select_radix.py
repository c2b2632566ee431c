"""v that is not finite: what finite gradients too large for the type, or a loaded state, may leave behind."""

import numpy as np
import pytest

from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels

LARGEST_NAN = {np.float32: np.uint32(0x7FFFFFFF), np.float64: np.uint64(0x7FFFFFFFFFFFFFFF)}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1000, 6001, 262_151])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("broken", ["inf", "nan", "largest nan"])
@pytest.mark.parametrize("share", [0.0005, 0.1, 1.0])
def test_the_largest_come_first_and_nothing_is_written_outside(threads, size, dtype, broken, share):
    rng = np.random.default_rng(0)
    v = rng.standard_normal(size).astype(dtype)
    bad = np.sort(rng.choice(size, max(1, int(size * share)), replace=False))
    if broken == "largest nan":
        v.view(LARGEST_NAN[dtype].dtype)[bad] = LARGEST_NAN[dtype]
    else:
        v[bad] = np.inf if broken == "inf" else np.nan
    kernels, k = NumbaKernels(threads), max(1, size // 100)
    u, thresholds, zeros = np.zeros(size, dtype), kernels.new_thresholds(1), np.zeros(size, dtype)
    for _ in range(3):
        before = v.copy()
        chosen = kernels.accumulate_and_select([SegmentWork(zeros, None, 0, size, k, 0.9)], u, v, thresholds)
        positions = chosen.positions
        assert len(positions) <= k
        assert np.all(np.diff(positions) > 0)
        assert positions.size == 0 or (positions[0] >= 0 and positions[-1] < size)
        np.testing.assert_array_equal(chosen.values, before[positions])
        if len(bad) >= k:
            assert np.isin(positions, bad).all()
        else:
            assert np.isin(bad, positions).all()


def test_finite_gradients_that_overflow_v():
    size = 10_000
    kernels = NumbaKernels(2)
    u, v, g = np.zeros(size), np.zeros(size), np.zeros(size)
    g[::100] = 1.5e308
    for _ in range(4):
        thresholds = kernels.new_thresholds(1)
        chosen = kernels.accumulate_and_select([SegmentWork(g, None, 0, size, 5, 0.0)], u, v, thresholds)
        assert len(chosen.positions) == 5
        assert (chosen.positions % 100 == 0).all()
