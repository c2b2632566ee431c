"""Predict a threshold for the candidates of each segment, and learn from every pass over memory.

A pass collects the entries of ``|v|`` at or above a threshold, and the k largest are picked among these candidates. A
threshold that is too low costs time; one that is too high leaves fewer than k candidates. After a pass the k-th largest
magnitude is known. Near it, the number of entries above t falls like ``t ** -slope``; the number of candidates gives
the slope.

The next threshold is the last k-th largest magnitude, raised by the expected growth and lowered by a margin. (Residuals
grow for hundreds of steps after a change of density, less in each step.) The margin follows the errors of the latest
expectations. It is large enough for a few more than k candidates, and small enough for at most five times k.

A row holds a segment's numbers. Checkpoints contain the rows.

Source: Ok-Topk reuses thresholds (Li and Hoefler 2022, arXiv 2201.07598); the prediction is new here.
"""

from __future__ import annotations

import math

import numpy as np

from dgc.core.layout import SMALL

# Columns of a row.
NEXT = 0  # threshold of the next pass; with 0 all entries but zeros are candidates
LEVEL = 1  # binary logarithm of the last k-th largest magnitude
CHANGE = 2  # the change of LEVEL since the step before
SPREAD = 3  # smoothed error of GROWTH: rises fast, falls slowly; growth below the expectation counts twice
SLOPE = 4  # how often the number of entries above a threshold halves for each doubling of the threshold
ENTRIES = 5  # the k of the row
GROWTH = 6  # the expected growth of LEVEL in the next step; never below 0
COLUMNS = 7

# Above this share of entries a threshold saves nothing: a histogram selects the entries after the pass.
HIGHEST_DENSITY = 0.05
# With fewer candidates than this share of k, a histogram selects the entries after the pass. With more, but fewer than
# k, all candidates are sent.
ENOUGH = 0.8

FIRST_SPREAD = 0.1
FIRST_SLOPE = 4.0
LOWEST_SLOPE, HIGHEST_SLOPE = 0.5, 64.0
RISE, FALL = 0.5, 0.25
# Larger errors (more than a factor of 1.27) are jumps. They widen the margin only as much as this error does.
LARGEST_ERROR = 0.35
SAFETY = 2.5  # the threshold lies below the predicted magnitude by this many times SPREAD
# The number of expected candidates beyond k, as a share of k. It is at least SHARE, plus a little for the noise of
# small counts, and at most MOST.
SHARE, MOST = 0.08, 4.0
LIMIT = 12  # at most this multiple of k candidates are kept
# After a selection by histogram, the slope is measured from the k-th largest magnitude down to this fraction of it.
WIDER = 1.0 / 1.08

COLLECT_NOTHING = math.inf


def new_thresholds(segments: int) -> np.ndarray:
    """Return ``(segments, COLUMNS)`` float64 of NaN, which means that nothing is known."""
    return np.full((segments, COLUMNS), np.nan)


def threshold(row: np.ndarray, k: int, length: int) -> float:
    """Return the threshold of the next pass for one segment.

    It is the least magnitude of a candidate. If it is 0, every nonzero entry is a candidate. It is infinite if nothing
    is known yet, or if the density is high. Then there are no candidates, and entries are selected after the pass.
    """
    if k <= 0:
        return COLLECT_NOTHING
    if length <= SMALL:
        return 0.0
    if k > HIGHEST_DENSITY * length or row[ENTRIES] != k or not row[NEXT] < math.inf:
        return COLLECT_NOTHING
    return float(row[NEXT])


def most_candidates(k: int, length: int) -> int:
    """Return how many candidates of a segment are kept. If there are more, entries are selected after the pass."""
    if length <= SMALL:
        return length
    return min(length, LIMIT * k + 1024)


def estimate(row: np.ndarray, k: int, used: float, count: int) -> float:
    """Estimate the k-th largest magnitude if only ``count < k`` entries reach the threshold ``used``."""
    kth: float = used * 2.0 ** (math.log2(max(count, 1) / k) / row[SLOPE])
    return kth


def learn(row: np.ndarray, k: int, used: float, count: int, kth: float) -> None:
    """Update one segment's thresholds after a pass.

    Args:
        row: (COLUMNS,) float64, in place.
        k: how many entries were to be selected.
        used: the threshold of the pass, or another magnitude.
        count: how many entries reach it.
        kth: the k-th largest magnitude, or its estimate; 0 if there are fewer than k non-zero entries.
    """
    if not kth < math.inf:
        row[:] = math.nan
        return
    known = row[ENTRIES] == k and row[NEXT] > 0.0
    row[ENTRIES] = k
    if kth == 0.0:
        row[NEXT], row[LEVEL], row[CHANGE], row[SPREAD], row[SLOPE] = 0.0, 0.0, 0.0, FIRST_SPREAD, FIRST_SLOPE
        row[GROWTH] = 0.0
        return
    level = math.log2(kth)
    slope = 0.0
    if count > k and kth > used > 0.0:
        slope = min(max(math.log2(count / k) / (level - math.log2(used)), LOWEST_SLOPE), HIGHEST_SLOPE)
    growth = 0.0
    if known:
        change, before = level - row[LEVEL], row[CHANGE]
        error = change - row[GROWTH]
        # The first growth was not predicted, so it says nothing about the error of predictions.
        if before != 0.0 or error < 0.0:
            size = min(max(-error, 0.5 * error), LARGEST_ERROR)
            row[SPREAD] += (RISE if size > row[SPREAD] else FALL) * (size - row[SPREAD])
        if slope > 0.0:
            row[SLOPE] += 0.3 * (slope - row[SLOPE])
        if change > 0.0 and before > 0.0:
            growth = min(change, change * change / before, before, 1.0)
        row[CHANGE] = change
    else:
        row[CHANGE], row[SPREAD] = 0.0, FIRST_SPREAD
        row[SLOPE] = slope if slope > 0.0 else FIRST_SLOPE
    row[GROWTH] = growth
    row[LEVEL] = level
    least = math.log2(1.0 + SHARE + 3.0 / math.sqrt(k) + 8.0 / k)
    margin = min(max(least / row[SLOPE], SAFETY * row[SPREAD]), max(least, math.log2(1.0 + MOST)) / row[SLOPE])
    row[NEXT] = 2.0 ** (level + growth - margin)
