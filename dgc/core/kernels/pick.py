"""Exactly the k largest of a segment's candidates.

Candidates lie in runs (one for each chunk of the segment), each in ascending order of position. Magnitudes are compared
as the bits of ``|v|``, called keys. No sorting: the k-th largest key is found by a histogram of the keys just above the
threshold, refined once or twice, and one more walk over the candidates writes the entries, in order. Every loop is
bounded whatever the values are, all equal included.
"""

from __future__ import annotations

import numpy as np

from dgc.core.kernels.jit import helper
from dgc.core.kernels.sweep import magnitude_mask

BINS = 2048
FEW = 64
"""Keys that are sorted by insertion instead of counted once more."""


@helper
def kth_key(bits, starts, counts, first, last, lowest, total, k, bins):
    """The k-th largest key of the candidates, and how many entries of just that key are among the k largest.

    Args:
        bits: the candidates' values as integers; run c is ``bits[starts[c] : starts[c] + counts[c]]``.
        starts: (chunks,) int64, as is ``counts``.
        counts: see starts.
        first: the segment's first run.
        last: the run after its last one.
        lowest: no key is below it.
        total: number of candidates.
        k: 0 < k <= total.
        bins: (BINS,) int64 scratch.

    Returns:
        (key, ties): all keys above ``key`` belong to the k largest, and the first ``ties`` equal to it.
    """
    width = 31 if bits.itemsize == 4 else 63
    mask = magnitude_mask(bits.itemsize)
    low, high = lowest, mask + 0
    # Just above the threshold a bin is 1/1024 of an octave wide; the last bin takes what is two octaves above it.
    shift = width - 8 - 10 if bits.itemsize == 4 else width - 11 - 10
    if lowest <= 1:
        shift = width - 11
    rank = total - k
    above = 0
    while True:
        bins[:] = 0
        for c in range(first, last):
            for i in range(starts[c], starts[c] + counts[c]):
                key = (bits[i] & mask) - low
                if key >= 0 and key <= high - low:
                    bins[min(key >> shift, BINS - 1)] += 1
        b = 0
        while rank >= bins[b]:
            rank -= bins[b]
            b += 1
        members = bins[b]
        for other in range(b + 1, BINS):
            above += bins[other]
        bottom = low + (b << shift)
        if b < BINS - 1:
            high = min(high, bottom + (1 << shift) - 1)
        low = bottom
        if low == high:
            return low, k - above
        if members <= FEW:
            return _kth_of_few(bits, starts, counts, first, last, low, high, rank, k - above, bins, mask)
        shift = 0
        while (high - low) >> shift >= BINS:
            shift += 1


@helper
def _kth_of_few(bits, starts, counts, first, last, low, high, rank, wanted, sorted_, mask):
    n = 0
    for c in range(first, last):
        for i in range(starts[c], starts[c] + counts[c]):
            key = bits[i] & mask
            if low <= key and key <= high:
                j = n
                while j > 0 and sorted_[j - 1] > key:
                    sorted_[j] = sorted_[j - 1]
                    j -= 1
                sorted_[j] = key
                n += 1
    kth = sorted_[rank]
    greater = 0
    for j in range(rank, n):
        greater += sorted_[j] > kth
    return kth, wanted - greater


@helper
def write_largest(positions, values, bits, starts, counts, first, last, key, ties, k, out_positions, out_values, place):
    """Write the k candidates above ``key``, or among the first ``ties`` equal to it, from ``place`` on, in order."""
    mask = magnitude_mask(bits.itemsize)
    n, end = place, place + k
    for c in range(first, last):
        for i in range(starts[c], starts[c] + counts[c]):
            if n == end:
                return
            # Written in any case and kept by advancing: no branch to mispredict.
            out_positions[n] = positions[i]
            out_values[n] = values[i]
            candidate = bits[i] & mask
            tie = np.int64(candidate == key) & np.int64(ties > 0)
            ties -= tie
            n += np.int64(candidate > key) | tie


@helper
def write_all(positions, values, starts, counts, first, last, out_positions, out_values, place):
    """Write all candidates from ``place`` on, in order."""
    n = place
    for c in range(first, last):
        for i in range(starts[c], starts[c] + counts[c]):
            out_positions[n] = positions[i]
            out_values[n] = values[i]
            n += 1
