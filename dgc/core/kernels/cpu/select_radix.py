"""Exactly the k largest of a whole segment, for when no threshold helps: nothing known yet, a jump, a high density.

A radix selection on the bits of ``|v|``: histograms of BINS bins from the top bits down give the k-th largest
magnitude, and one more pass writes the entries in order. A bounded number of passes that only read v (4 bytes an
element), whatever the values are. With the candidates' own search a step at a density of 25 % takes twice as long.
"""

from __future__ import annotations

import numpy as np

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.cpu.accumulate import key_of, magnitude_mask, value_of
from dgc.core.kernels.cpu.simd import LANES, bits_of, count_bits, fetch_add, load, lowest_bit, reaching, threshold
from dgc.core.kernels.cpu.work_table import ENTRIES, LENGTH, OFFSET, OUT

BINS = 2048
_UINT64_1 = np.uint64(1)
_ALL_LANES = np.uint64(0xFFFFFFFFFFFFFFFF)


@helper
def _count(v, bits, key):
    """How many entries reach ``key``."""
    mask, keys, count = magnitude_mask(v.itemsize), threshold(v, key), 0
    whole = v.size // LANES * LANES
    for i in range(0, whole, LANES):
        count += count_bits(reaching(load(v, i), keys))
    for i in range(whole, v.size):
        count += (bits[i] & mask) >= key
    return count


@helper
def _tally(v, bits, low, high, shift, bins):
    """Histogram of the keys from ``low`` to ``high``, by ``(key - low) >> shift``."""
    mask = magnitude_mask(v.itemsize)
    bins[:] = 0
    if low == 0 and high == mask:
        for i in range(v.size):
            bins[(bits[i] & mask) >> shift] += 1
        return
    # No key is above the largest one, whose successor would be negative.
    lows, highs = threshold(v, low), threshold(v, min(high, mask - 1) + 1)
    unlimited = _ALL_LANES if high == mask else np.uint64(0)
    whole = v.size // LANES * LANES
    for i in range(0, whole, LANES):
        x = load(v, i)
        found = reaching(x, lows) & (~reaching(x, highs) | unlimited)
        while found != 0:
            bins[((bits[i + lowest_bit(found)] & mask) - low) >> shift] += 1
            found &= found - _UINT64_1
    for i in range(whole, v.size):
        key = bits[i] & mask
        if low <= key and key <= high:
            bins[(key - low) >> shift] += 1


@helper
def _kth_key(v, bits, k, bins):
    """The k-th largest key, and how many entries of just that key are among the k largest; more than k are not 0."""
    low, high, wanted = 0, magnitude_mask(v.itemsize), k
    while low < high:
        shift = 0
        while (high - low) >> shift >= BINS:
            shift += 1
        _tally(v, bits, low, high, shift, bins)
        b = BINS - 1
        while wanted > bins[b] and b > 0:
            wanted -= bins[b]
            b -= 1
        bottom = low + (b << shift)
        low, high = max(bottom, 1), min(high, bottom + (1 << shift) - 1)
    return low, wanted


@helper
def _write(v, bits, key, ties, offset, out_positions, out_values):
    """Fill the outputs with the entries above ``key``, or among the first ``ties`` equal to it, in order."""
    mask, n, i = magnitude_mask(v.itemsize), 0, 0
    keys = threshold(v, max(key, 1))
    while n < out_positions.size:
        last = i + LANES > v.size
        found = np.uint64((bits[i] & mask) >= max(key, 1)) if last else reaching(load(v, i), keys)
        while found != 0 and n < out_positions.size:
            j = i + lowest_bit(found)
            found &= found - _UINT64_1
            tie = (bits[j] & mask) == key
            if not tie or ties > 0:
                out_positions[n] = offset + j
                out_values[n] = v[j]
                n += 1
            ties -= tie
        i += 1 if last else LANES


@entry()
def select_whole(
    worker, progress, count, v, integers, thresholds, which, out_positions, out_values, taken
):  # fmt: skip
    """Select segments from all their entries, each by one thread. A kernel for ``Team``.

    Args:
        worker: not used.
        progress: (2,) int64: segments taken, segments done.
        count: number of segments.
        v: (n,) float32 or float64.
        integers: (S, 13) work table.
        thresholds: (S, COLUMNS) float64, updated.
        which: (count,) int64 rows of both.
        out_positions: (k,) int64; segment s fills its part from its OUT on.
        out_values: (k,) of v's type, likewise.
        taken: (S,) int64, receives the number of entries picked.
    """
    all_bits, bins, like = bits_of(v), np.empty(BINS, np.int64), np.empty(1, v.dtype)
    while True:
        ticket = fetch_add(progress, 0, 1)
        if ticket >= count:
            break
        s = which[ticket]
        start, k, out = integers[s, OFFSET], integers[s, ENTRIES], integers[s, OUT]
        # Slices, so that indices start at 0: one that might be negative would be a branch in each loop.
        own, bits = v[start : start + integers[s, LENGTH]], all_bits[start : start + integers[s, LENGTH]]
        nonzero = _count(own, bits, 1)
        key, ties, kth, reached = 0, 0, 0.0, 0
        if nonzero > k:
            key, ties = _kth_key(own, bits, k, bins)
            kth = value_of(key, like)
            reached = _count(own, bits, key_of(rules.WIDER * kth, like))
        taken[s] = min(k, nonzero)
        _write(own, bits, key, ties, start, out_positions[out : out + taken[s]], out_values[out : out + taken[s]])
        rules.learn(thresholds[s], k, rules.WIDER * kth, reached, kth)
        fetch_add(progress, 1, 1)
