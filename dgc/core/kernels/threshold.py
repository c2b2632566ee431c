"""The candidate threshold of each segment: chosen before a pass over memory, corrected by what the pass found.

A pass collects the entries of ``|v|`` at or above a threshold, and the k largest are picked among them. Too low a
threshold costs time, too high a one leaves fewer than k. After a pass the k-th largest magnitude is known exactly. Near
it the number of entries above t falls like ``t ** -slope``, and the slope is known from the number of candidates. The
next threshold is the last k-th largest magnitude, raised by the growth to be expected (residuals pile up, for hundreds
of steps after a change of density, by less from step to step), and lowered by what such expectations have lately been
wrong by, but at least so far that a few entries more than k are to be expected, and at most so far that five times k
are.

The rows are part of a checkpoint.

Source: the reuse of thresholds is Ok-Topk's (Li and Hoefler 2022, arXiv 2201.07598); the prediction is ours.
"""

from __future__ import annotations

import math

import numpy as np

from dgc.core.layout import SMALL

NEXT = 0  # threshold for the next pass; 0 admits every entry that is not zero
LEVEL = 1  # binary logarithm of the last k-th largest magnitude
CHANGE = 2  # by how much that had changed from the step before
# Smoothed size of errors of the growth expected: rises fast, falls slowly; magnitudes that turn out to be smaller than
# expected count twice as much as larger ones.
SPREAD = 3
# How steeply the number of entries above a threshold falls, in doublings for each doubling of the threshold.
SLOPE = 4
ENTRIES = 5  # the k that the row belongs to
GROWTH = 6  # by how much the logarithm is expected to grow in the coming step; never below 0
COLUMNS = 7

# Above this share of entries a threshold saves nothing; the segment is selected by a histogram after the pass.
HIGHEST_DENSITY = 0.05
# With fewer candidates than this share of k the segment is selected by a histogram after the pass; with more, what
# there is is sent, and the rest at the next step.
ENOUGH = 0.8

FIRST_SPREAD = 0.1
FIRST_SLOPE = 4.0
LOWEST_SLOPE, HIGHEST_SLOPE = 0.5, 64.0
RISE, FALL = 0.5, 0.25
# Errors beyond this (a factor of 1.27) are jumps: they leave no wider margin behind.
LARGEST_ERROR = 0.35
SAFETY = 2.5  # the threshold lies below the predicted magnitude by this many times SPREAD
# Candidates to expect beyond k, at least: this share of it, and a bit for the noise of small counts.
SHARE = 0.08
MOST = 4.0  # candidates to expect beyond k, at most, as a multiple of k
LIMIT = 12  # candidates that are kept, as a multiple of k
# After a selection by histogram the slope is measured between the k-th largest magnitude and this part of it.
WIDER = 1.0 / 1.08

COLLECT_NOTHING = math.inf


def new_thresholds(segments: int) -> np.ndarray:
    """Return ``(segments, COLUMNS)`` float64 of NaN: nothing known."""
    return np.full((segments, COLUMNS), np.nan)


def threshold(row: np.ndarray, k: int, length: int) -> float:
    """Threshold of the coming pass for one segment.

    Returns:
        The least magnitude of a candidate; 0 when every non-zero entry is one; infinity when no candidates are
        collected because the segment is selected after the pass (nothing known yet, or a high density).
    """
    if k <= 0:
        return COLLECT_NOTHING
    if length <= SMALL:
        return 0.0
    if k > HIGHEST_DENSITY * length or row[ENTRIES] != k or not row[NEXT] < math.inf:
        return COLLECT_NOTHING
    return float(row[NEXT])


def most_candidates(k: int, length: int) -> int:
    """How many candidates of a segment are kept; with more it is selected after the pass."""
    if length <= SMALL:
        return length
    return min(length, LIMIT * k + 1024)


def estimate(row: np.ndarray, k: int, used: float, count: int) -> float:
    """The k-th largest magnitude, when only ``count < k`` entries reach the threshold ``used``."""
    kth: float = used * 2.0 ** (math.log2(max(count, 1) / k) / row[SLOPE])
    return kth


def learn(row: np.ndarray, k: int, used: float, count: int, kth: float) -> None:
    """Update one segment's thresholds after a pass.

    Args:
        row: (COLUMNS,) float64, in place.
        k: entries that were to be selected.
        used: a magnitude: the threshold of the pass, or another at which the entries were counted.
        count: how many entries reached it.
        kth: the k-th largest magnitude (or its estimate); 0 when fewer than k entries are not zero.
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
        # A first growth could not be expected: it says nothing about how good expectations are.
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
