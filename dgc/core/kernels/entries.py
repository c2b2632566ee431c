"""Entries of all ranks added up, on the host: whatever backend works on the tensors, messages arrive there.

Imports Numba; only modules that are loaded on first use may import this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.kernels.compile import entry
from dgc.core.kernels.simd import lowest_bit

BLOCK = 1 << 15
"""Positions that are added up at a time: their sums stay in the cache."""

WORD = 64
"""Positions whose presence one integer holds."""


def add_up(
    entries: Sequence[tuple[np.ndarray, np.ndarray]], factor: float, kind: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the ranks' entries: at each place ``((0 + a * factor) + b * factor) + ...``, in the order given.

    Args:
        entries: of each rank (k,) int64 positions, ascending and unique, and (k,) values.
        factor: rounded to ``kind`` before it is used.
        kind: float32 or float64.

    Returns:
        (n,) int64 positions that any rank has, ascending and unique, and (n,) sums of ``kind``.
    """
    bounds = np.zeros(len(entries) + 1, np.int64)
    np.cumsum([positions.size for positions, _ in entries], out=bounds[1:])
    total = int(bounds[-1])
    if not total:
        return np.empty(0, np.int64), np.empty(0, kind)
    positions = np.concatenate([p for p, _ in entries])
    values = np.concatenate([v.astype(kind, copy=False) for _, v in entries])
    if len(entries) == 1:
        with np.errstate(over="ignore", invalid="ignore"):
            return positions, kind.type(0) + values * kind.type(factor)
    out, sums = np.empty(total, np.int64), np.empty(total, kind)
    here, present = np.zeros(BLOCK, kind), np.zeros(BLOCK // WORD, np.uint64)
    count = _add_up(positions, values, bounds, np.array([factor], kind), here, present, out, sums)
    return out[:count], sums[:count]


@entry()
def _add_up(positions, values, bounds, factor, here, present, out, sums):
    ranks = len(bounds) - 1
    at = bounds[:-1].copy()
    count, last = 0, np.int64(-1)
    for r in range(ranks):
        if bounds[r + 1] > bounds[r]:
            last = max(last, positions[bounds[r + 1] - 1])
    start = np.int64(0)
    while start <= last:
        stop = start + BLOCK
        following = last + 1
        for r in range(ranks):
            i, end = at[r], bounds[r + 1]
            while i < end and positions[i] < stop:
                place = positions[i] - start
                here[place] += values[i] * factor[0]
                present[place // WORD] |= np.uint64(1) << np.uint64(place % WORD)
                i += 1
            at[r] = i
            if i < end:
                following = min(following, positions[i])
        for w in range(len(present)):
            word = present[w]
            if word == 0:
                continue
            present[w] = 0
            while word:
                place = w * WORD + lowest_bit(word)
                word &= word - np.uint64(1)
                out[count] = start + place
                sums[count] = here[place]
                here[place] = 0
                count += 1
        start = max(stop, following)
    return count
