"""The candidate threshold of each segment: chosen before a pass over memory, corrected by what the pass found.

A pass collects the entries of ``|v|`` at or above a threshold, and the k largest are picked among them. Too low a
threshold costs time, too high a one leaves fewer than k. After a pass the k-th largest magnitude is known exactly, so
its next value is predicted (level and trend, double exponential smoothing) and the threshold is set below that by
what the predictions have lately missed by, and by enough to expect a few entries more than k. Near the k-th
largest the number of entries above a threshold t falls like ``t ** -slope``; the slope comes from the number of
candidates and converts one margin into the other.

Every backend calls these functions, or a copy of them: they only add, multiply, divide, compare and take one square
root, all exactly rounded in float64, so all backends keep the same numbers. The rows are part of a checkpoint.

Source: threshold reuse as in Ok-Topk (Li and Hoefler 2022, arXiv 2201.07598); the prediction is ours.
"""

from __future__ import annotations

import math

import numpy as np

NEXT = 0
"""Threshold for the next pass; 0 admits every entry that is not zero."""
LEVEL = 1
"""Smoothed k-th largest magnitude."""
TREND = 2
"""Smoothed relative change of the level from step to step."""
SPREAD = 3
"""Smoothed relative error of the predictions: rises at once, falls slowly."""
SLOPE = 4
"""Relative decrease of the number of entries above a threshold, for each relative increase of the threshold."""
ENTRIES = 5
"""The k that the row belongs to."""
COLUMNS = 6

SMALL = 4096
"""Segments up to this length need no threshold: all their entries are candidates."""
HIGHEST_DENSITY = 0.05
"""Above this share of entries a threshold saves nothing; the segment is selected by a histogram after the pass."""
ENOUGH = 0.8
"""With fewer candidates than this share of k the segment is selected by a histogram after the pass; with more, what
there is is sent, and the rest at the next step."""

FIRST_SPREAD = 0.1
FIRST_SLOPE = 4.0
LOWEST_SLOPE, HIGHEST_SLOPE = 0.5, 64.0
GAIN_LEVEL, GAIN_TREND = 0.6, 0.2
RISE, FALL = 0.5, 0.08
SAFETY = 3.0
"""Predictions may miss by this many times SPREAD."""
SHARE = 0.05
"""Candidates to expect beyond k, at least: this share of it, and a bit for the noise of small counts."""
MOST = 3.0
"""Candidates to expect beyond k, at most, as a multiple of k."""

COLLECT_NOTHING = math.inf


def new_control(segments: int) -> np.ndarray:
    """Return ``(segments, COLUMNS)`` float64 of NaN: nothing known."""
    return np.full((segments, COLUMNS), np.nan)


def threshold(row: np.ndarray, k: int, length: int) -> float:
    """Threshold of the coming pass for one segment.

    Args:
        row: (COLUMNS,) float64, the segment's control.
        k: entries to select.
        length: entries of the segment.

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
    return row[NEXT]


def most_candidates(k: int, length: int) -> int:
    """How many candidates of a segment are kept; with more it is selected after the pass."""
    if length <= SMALL:
        return length
    return min(length, int((2 * MOST + 2) * k) + 1024)


def estimate(row: np.ndarray, k: int, used: float, count: int) -> float:
    """The k-th largest magnitude, when only ``count < k`` entries reach the threshold ``used``."""
    return used * max(0.5, 1.0 - (k / max(count, 1) - 1.0) / row[SLOPE])


def learn(row: np.ndarray, k: int, used: float, count: int, kth: float) -> None:
    """Update one segment's control after a pass.

    Args:
        row: (COLUMNS,) float64, in place.
        k: entries that were to be selected.
        used: the threshold of the pass.
        count: how many entries reached it; 0 when that is not known.
        kth: the k-th largest magnitude (or its estimate); 0 when fewer than k entries are not zero.
    """
    if not kth < math.inf:
        row[:] = math.nan
        return
    known = row[ENTRIES] == k and row[LEVEL] > 0.0
    row[ENTRIES] = k
    if kth == 0.0:
        row[NEXT], row[LEVEL], row[TREND], row[SPREAD], row[SLOPE] = 0.0, 0.0, 0.0, FIRST_SPREAD, FIRST_SLOPE
        return
    if known:
        predicted = row[LEVEL] * (1.0 + row[TREND])
        error = kth / predicted - 1.0
        size = min(abs(error), 1.0)
        row[SPREAD] += (RISE if size > row[SPREAD] else FALL) * (size - row[SPREAD])
        if size > 0.5:
            # A jump, not noise: start again from what was seen.
            row[LEVEL], row[TREND] = kth, 0.0
        else:
            row[LEVEL] = predicted * (1.0 + GAIN_LEVEL * error)
            row[TREND] += GAIN_TREND * error
        if count > k and kth > used > 0.0:
            seen = (count / k - 1.0) / (kth / used - 1.0)
            row[SLOPE] += 0.2 * (min(max(seen, LOWEST_SLOPE), HIGHEST_SLOPE) - row[SLOPE])
    else:
        row[LEVEL], row[TREND], row[SPREAD], row[SLOPE] = kth, 0.0, FIRST_SPREAD, FIRST_SLOPE
    beyond = SHARE + 3.0 / math.sqrt(k) + 8.0 / k
    margin = min(max(beyond / row[SLOPE], SAFETY * row[SPREAD]), max(beyond, MOST) / row[SLOPE])
    row[NEXT] = row[LEVEL] * (1.0 + row[TREND]) / (1.0 + margin)
