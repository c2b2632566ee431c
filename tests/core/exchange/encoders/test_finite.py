"""A value that is not finite is seen wherever it is; large finite ones are not taken for one."""

import numpy as np
import pytest

from dgc.core.exchange.encoders.finite import is_finite


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_is_finite(dtype):
    largest = np.finfo(dtype).max
    assert is_finite(np.empty(0, dtype))
    assert is_finite(np.array([1, -2, 0], dtype))
    assert is_finite(np.array([largest, -largest, largest], dtype)), "their squares and their sum overflow"
    for wrong in (np.nan, np.inf, -np.inf):
        for place in (0, 500, 999):
            values = np.ones(1000, dtype)
            values[place] = wrong
            assert not is_finite(values)
    assert not is_finite(np.array([np.inf, -np.inf], dtype))
