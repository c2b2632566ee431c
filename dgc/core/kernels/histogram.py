"""Exactly the k largest of a whole segment, for when no threshold helps: nothing known yet, a jump, a high density.

A radix selection on the bits of ``|v|``: histograms of 2048 bins from the top bits down give the k-th largest
magnitude, then one pass counts and one writes the entries in order. A bounded number of passes that only read v
(4 bytes an element), whatever the values are.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from dgc.core.kernels.control import WIDER
from dgc.core.kernels.jit import entry, helper
from dgc.core.kernels.pick import BINS
from dgc.core.kernels.sweep import key_of, magnitude_mask, value_of
from dgc.core.kernels.table import ENTRIES, LENGTH, OFFSET, OUT
from dgc.core.kernels.vector import LANES, count_bits, fetch_add, load, lowest_bit, reaching, threshold

_UINT64_1 = np.uint64(1)


@helper
def _bound(length, parts, part):
    """Where a part of a segment begins: parts are of equal length but for whole vectors."""
    return length if part == parts else length * part // parts // LANES * LANES


@helper
def _count(v, bits, start, stop, key):
    """How many of the entries ``start`` to ``stop`` reach ``key``, and how many exceed it."""
    mask = magnitude_mask(v.itemsize)
    keys, above = threshold(v, key), threshold(v, key + 1)
    reach, exceed = 0, 0
    i = start
    while i + LANES <= stop:
        x = load(v, i)
        reach += count_bits(reaching(x, keys))
        exceed += count_bits(reaching(x, above))
        i += LANES
    while i < stop:
        own = bits[i] & mask
        reach += own >= key
        exceed += own > key
        i += 1
    return reach, exceed


@helper
def _tally_all(bits, start, stop, shift, bins):
    """Histogram of all keys by their bits from ``shift`` up. ``bins``: (2, BINS), both halves to be summed."""
    mask = magnitude_mask(bits.itemsize)
    bins[:] = 0
    i = start
    # Two tables in turn: neighbours often fall into one bin, and its counter would be waited for.
    while i + 2 <= stop:
        bins[0, (bits[i] & mask) >> shift] += 1
        bins[1, (bits[i + 1] & mask) >> shift] += 1
        i += 2
    if i < stop:
        bins[0, (bits[i] & mask) >> shift] += 1


@helper
def _tally_range(v, bits, start, stop, low, high, shift, bins):
    """Histogram of the keys from ``low`` to ``high``, by ``(key - low) >> shift``."""
    mask = magnitude_mask(v.itemsize)
    bins[:] = 0
    lows, highs = threshold(v, low), threshold(v, high + 1)
    i = start
    while i + LANES <= stop:
        x = load(v, i)
        found = reaching(x, lows) & ~reaching(x, highs)
        while found != 0:
            bins[0, ((bits[i + lowest_bit(found)] & mask) - low) >> shift] += 1
            found &= found - _UINT64_1
        i += LANES
    while i < stop:
        key = bits[i] & mask
        if low <= key and key <= high:
            bins[0, (key - low) >> shift] += 1
        i += 1


@helper
def _descend(bins, parts, low, high, shift, wanted):
    """The bin that holds the ``wanted``-th largest key: its (low, high), and how many are still wanted inside."""
    b = BINS - 1
    while True:
        members = 0
        for part in range(parts):
            members += bins[part, 0, b] + bins[part, 1, b]
        if wanted <= members:
            break
        wanted -= members
        b -= 1
    bottom = low + (b << shift)
    return max(bottom, 1), min(high, bottom + (1 << shift) - 1), wanted


@helper
def _finer(low, high):
    shift = 0
    while (high - low) >> shift >= BINS:
        shift += 1
    return shift


@helper
def _write(v, bits, start, stop, key, ties, out_positions, out_values, place):
    """Write the entries above ``key`` and the first ``ties`` equal to it, in order, from ``place`` on."""
    mask = magnitude_mask(v.itemsize)
    keys = threshold(v, max(key, 1))
    i = start
    while i < stop:
        if i + LANES <= stop:
            found = reaching(load(v, i), keys)
            step = LANES
        else:
            found = np.uint64((bits[i] & mask) >= max(key, 1))
            step = 1
        while found != 0:
            j = i + lowest_bit(found)
            found &= found - _UINT64_1
            if bits[j] & mask == key:
                if ties == 0:
                    continue
                ties -= 1
            out_positions[place] = j
            out_values[place] = v[j]
            place += 1
        i += step


def _select_large(parts, v, bits, offset, length, k, bins, tallies, like, out_positions, out_values, place):
    """Select one segment with all threads.

    Args:
        parts: number of threads, P.
        v: (n,) float32 or float64.
        bits: the same memory as int32 or int64.
        offset: where the segment begins.
        length: its elements.
        k: 0 < k.
        bins: (P, 2, BINS) int64 scratch.
        tallies: (P, 2) int64 scratch.
        like: (1,) of v's type, scratch.
        out_positions: (·,) int64, filled from ``place`` on.
        out_values: (·,) of v's type, likewise.
        place: see out_positions.

    Returns:
        How many entries were written, the key of the k-th largest magnitude (0 when fewer are not zero), and how many
        entries reach WIDER times that magnitude.
    """
    for turn in prange(parts):
        part = np.int64(turn)
        start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
        tallies[part, 0], tallies[part, 1] = _count(v, bits, start, stop, 1)
    nonzero = tallies[:parts, 0].sum()
    key, ties, taken = 0, 0, nonzero
    if nonzero > k:
        taken = k
        shift = (31 if v.itemsize == 4 else 63) - 11
        for turn in prange(parts):
            part = np.int64(turn)
            start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
            _tally_all(bits, start, stop, shift, bins[part])
        low, high, wanted = _descend(bins, parts, 0, magnitude_mask(v.itemsize), shift, k)
        while low < high:
            shift = _finer(low, high)
            for turn in prange(parts):
                part = np.int64(turn)
                start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
                _tally_range(v, bits, start, stop, low, high, shift, bins[part])
            low, high, wanted = _descend(bins, parts, low, high, shift, wanted)
        key, ties = low, wanted
        for turn in prange(parts):
            part = np.int64(turn)
            start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
            tallies[part, 0], tallies[part, 1] = _count(v, bits, start, stop, key)
    for turn in prange(parts):
        part = np.int64(turn)
        start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
        before, left = place, ties
        for earlier in range(part):
            equal = tallies[earlier, 0] - tallies[earlier, 1] if key > 0 else 0
            before += (tallies[earlier, 1] if key > 0 else tallies[earlier, 0]) + min(left, equal)
            left -= min(left, equal)
        _write(v, bits, start, stop, key, left, out_positions, out_values, before)
    wider = 0
    if key > 0:
        below = key_of(WIDER * value_of(key, like), like)
        for turn in prange(parts):
            part = np.int64(turn)
            start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
            tallies[part, 0], tallies[part, 1] = _count(v, bits, start, stop, below)
        wider = tallies[:parts, 0].sum()
    return taken, key, wider


@helper
def _select_one(v, bits, offset, length, k, bins, like, out_positions, out_values, place):
    stop = offset + length
    nonzero, _ = _count(v, bits, offset, stop, 1)
    key, ties, taken = 0, 0, nonzero
    if nonzero > k:
        taken = k
        shift = (31 if v.itemsize == 4 else 63) - 11
        _tally_all(bits, offset, stop, shift, bins[0])
        low, high, wanted = _descend(bins, 1, 0, magnitude_mask(v.itemsize), shift, k)
        while low < high:
            shift = _finer(low, high)
            _tally_range(v, bits, offset, stop, low, high, shift, bins[0])
            low, high, wanted = _descend(bins, 1, low, high, shift, wanted)
        key, ties = low, wanted
    _write(v, bits, offset, stop, key, ties, out_positions, out_values, place)
    wider = 0
    if key > 0:
        wider, _ = _count(v, bits, offset, stop, key_of(WIDER * value_of(key, like), like))
    return taken, key, wider


def _select_small(parts, v, bits, integers, which, bins, likes, tickets, out_positions, out_values, taken, keys, wider):
    """Select several segments, each by one thread.

    Args:
        parts: number of threads, P.
        v: (n,) float32 or float64.
        bits: the same memory as int32 or int64.
        integers: (S, 13) the work table.
        which: (·,) int64 rows of it.
        bins: (P, 2, BINS) int64 scratch.
        likes: (P, 1) of v's type, scratch.
        tickets: (1,) int64, 0.
        out_positions: (·,) int64; segment s fills it from its OUT on.
        out_values: (·,) of v's type, likewise.
        taken: (S,) int64, how many entries were written.
        keys: (S,) int64, the key of the k-th largest magnitude (0 when fewer are not zero).
        wider: (S,) int64, how many entries reach WIDER times that magnitude.
    """
    for turn in prange(parts):
        part = np.int64(turn)
        while True:
            ticket = fetch_add(tickets, 0, 1)
            if ticket >= which.size:
                break
            s = which[ticket]
            taken[s], keys[s], wider[s] = _select_one(
                v, bits, integers[s, OFFSET], integers[s, LENGTH], integers[s, ENTRIES], bins[part : part + 1],
                likes[part], out_positions, out_values, integers[s, OUT],
            )  # fmt: skip


large_alone = entry()(_select_large)
large_together = entry(parallel=True)(_select_large)
small_alone = entry()(_select_small)
small_together = entry(parallel=True)(_select_small)
