"""Exactly the k largest of a whole segment, for when no threshold helps: nothing known yet, a jump, a high density.

A radix selection on the bits of ``|v|``: histograms of 2048 bins from the top bits down give the k-th largest
magnitude, then one pass counts and one writes the entries in order. A bounded number of passes that only read v
(4 bytes an element), whatever the values are.
"""

from __future__ import annotations

import numpy as np

from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.cpu.accumulate import key_of, magnitude_mask, value_of
from dgc.core.kernels.cpu.select_candidates import BINS
from dgc.core.kernels.cpu.simd import LANES, count_bits, fetch_add, load, lowest_bit, reaching, threshold
from dgc.core.kernels.cpu.work_table import ENTRIES, LENGTH, OFFSET, OUT
from dgc.core.kernels.threshold import WIDER

_UINT64_1 = np.uint64(1)
_ALL_LANES = np.uint64(0xFFFFFFFFFFFFFFFF)


@helper
def _bound(length, parts, part):
    """Where a part of a segment begins: parts are of equal length but for whole vectors."""
    return length if part == parts else length * part // parts // LANES * LANES


@helper
def _none_above(key, itemsize):
    """All lanes if no key is greater than ``key``, the largest there is: ``key + 1`` would be negative. Else none."""
    return _ALL_LANES if key == magnitude_mask(itemsize) else np.uint64(0)


@helper
def _count(v, bits, start, stop, key):
    """How many of the entries ``start`` to ``stop`` reach ``key``, and how many exceed it."""
    mask = magnitude_mask(v.itemsize)
    keys, above = threshold(v, key), threshold(v, key + 1)
    no = _none_above(key, v.itemsize)
    reach, exceed = 0, 0
    i = start
    while i + LANES <= stop:
        x = load(v, i)
        reach += count_bits(reaching(x, keys))
        exceed += count_bits(reaching(x, above) & ~no)
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
    no = _none_above(high, v.itemsize)
    i = start
    while i + LANES <= stop:
        x = load(v, i)
        found = reaching(x, lows) & (~reaching(x, highs) | no)
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
def _descend(bins, low, high, shift, wanted):
    """The bin that holds the ``wanted``-th largest key: its (low, high), and how many are still wanted inside.

    ``bins``: (·, 2, BINS), the histograms of all parts.
    """
    b = BINS - 1
    while True:
        members = 0
        for part in range(len(bins)):
            members += bins[part, 0, b] + bins[part, 1, b]
        if wanted <= members or b == 0:
            break
        wanted -= members
        b -= 1
    bottom = low + (b << shift)
    return max(bottom, 1), min(high, bottom + (1 << shift) - 1), wanted


@helper
def first_shift(itemsize):
    """Bits of a key below those of the first histogram."""
    return (31 if itemsize == 4 else 63) - 11


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
            if place >= out_positions.size:
                return
            out_positions[place] = j
            out_values[place] = v[j]
            place += 1
        i += step


COUNT, TALLY_ALL, TALLY_RANGE, WRITE = range(4)
"""What :func:`sweep_parts` does with each part of a segment."""


@entry()
def sweep_parts(
    worker, progress, parts, task, v, bits, offset, length, low, high, shift, bins, tallies, ties, out_positions,
    out_values, place,
):  # fmt: skip
    """One pass over a segment in parts. A kernel for ``Team``.

    COUNT: ``tallies`` receives how many entries reach ``low`` and how many exceed it. TALLY_ALL and TALLY_RANGE:
    ``bins`` receives the histograms of all keys, or of those from ``low`` to ``high``. WRITE: the entries above ``low``
    and the first ``ties`` equal to it go out, in order, ``tallies`` being those of a COUNT of ``max(low, 1)``.

    Args:
        worker: not used.
        progress: (2,) int64: parts taken, parts done.
        parts: P.
        task: see above.
        v: (n,) float32 or float64.
        bits: the same memory as int32 or int64.
        offset: where the segment begins.
        length: its elements.
        low: see above.
        high: see above.
        shift: bits of a key below the histogram's.
        bins: (P, 2, BINS) int64.
        tallies: (P, 2) int64.
        ties: see above.
        out_positions: (·,) int64, filled from ``place`` on.
        out_values: (·,) of v's type, likewise.
        place: see out_positions.
    """
    while True:
        part = fetch_add(progress, 0, 1)
        if part >= parts:
            break
        start, stop = offset + _bound(length, parts, part), offset + _bound(length, parts, part + 1)
        if task == COUNT:
            tallies[part, 0], tallies[part, 1] = _count(v, bits, start, stop, low)
        elif task == TALLY_ALL:
            _tally_all(bits, start, stop, shift, bins[part])
        elif task == TALLY_RANGE:
            _tally_range(v, bits, start, stop, low, high, shift, bins[part])
        else:
            before, left = place, ties
            for earlier in range(part):
                equal = min(left, tallies[earlier, 0] - tallies[earlier, 1]) if low > 0 else 0
                before += (tallies[earlier, 1] if low > 0 else tallies[earlier, 0]) + equal
                left -= equal
            _write(v, bits, start, stop, low, left, out_positions, out_values, before)
        fetch_add(progress, 1, 1)


@entry()
def descend(bins, low, high, shift, wanted):
    """After a histogram: the range that holds the k-th largest key, how many are wanted in it, and the next shift."""
    low, high, wanted = _descend(bins, low, high, shift, wanted)
    return low, high, wanted, _finer(low, high)


@entry()
def wider_key(key, like):
    """The key of WIDER times the magnitude of ``key``. ``like``: (1,) scratch of the type."""
    return key_of(WIDER * value_of(key, like), like)


@entry()
def select_each(worker, progress, count, v, bits, integers, which, bins, likes, out_positions, out_values, found):
    """Select several segments, each by one thread. A kernel for ``Team``, W threads.

    Args:
        worker: this thread's number, below W.
        progress: (2,) int64: segments taken, segments done.
        count: number of segments.
        v: (n,) float32 or float64.
        bits: the same memory as int32 or int64.
        integers: (S, 13) the work table.
        which: (count,) int64 rows of it.
        bins: (W, 2, BINS) int64 scratch.
        likes: (W, 1) of v's type, scratch.
        out_positions: (·,) int64; segment s fills it from its OUT on.
        out_values: (·,) of v's type, likewise.
        found: (S, 3) int64, receives how many entries were written, the key of the k-th largest magnitude (0 when
            fewer are not zero), and how many entries reach WIDER times that magnitude.
    """
    while True:
        ticket = fetch_add(progress, 0, 1)
        if ticket >= count:
            break
        s = which[ticket]
        offset, length, k = integers[s, OFFSET], integers[s, LENGTH], integers[s, ENTRIES]
        stop = offset + length
        nonzero, _ = _count(v, bits, offset, stop, 1)
        key, ties = 0, 0
        if nonzero > k:
            shift = first_shift(v.itemsize)
            _tally_all(bits, offset, stop, shift, bins[worker])
            low, high, wanted = _descend(bins[worker : worker + 1], 0, magnitude_mask(v.itemsize), shift, k)
            while low < high:
                shift = _finer(low, high)
                _tally_range(v, bits, offset, stop, low, high, shift, bins[worker])
                low, high, wanted = _descend(bins[worker : worker + 1], low, high, shift, wanted)
            key, ties = low, wanted
        _write(v, bits, offset, stop, key, ties, out_positions, out_values, integers[s, OUT])
        found[s, 0], found[s, 1], found[s, 2] = min(k, nonzero), key, 0
        if key > 0:
            below = key_of(WIDER * value_of(key, likes[worker]), likes[worker])
            found[s, 2], _ = _count(v, bits, offset, stop, below)
        fetch_add(progress, 1, 1)
