"""The pass over a residual that is looked at. Loads Numba, so that only the first look imports it."""

from __future__ import annotations

import numpy as np

from dgc.core.kernels.compile import entry


@entry(__file__)
def look(v: np.ndarray, last: np.ndarray, clock: int) -> tuple[float, int, int, int]:
    """Sum of squares, and what waits; an entry that is 0 has nothing to wait with, and begins anew.

    Args:
        v: (n,) float32 or float64, read only.
        last: (n,) int32, when each entry was sent last; in place.
        clock: now. What was sent now does not wait, though its codec's error stays.

    Returns:
        Sum of squares, number of entries that wait, steps that they have waited added up, and the longest of these.
    """
    squares, waiting, ages, longest = 0.0, 0, 0, 0
    for i in range(len(v)):
        x = float(v[i])
        squares += x * x
        if x == 0.0:
            last[i] = clock
        age = clock - last[i]
        ages += age
        waiting += age > 0
        longest = max(longest, age)
    return squares, waiting, ages, longest
