"""The pass over one bucket: correct momentum, collect the entries above a threshold, and pick the k largest of them.

A chunk is a piece of one segment. Threads take one chunk after the other, and each writes candidates into a scratch
array of its own. The thread that finishes a segment's last chunk picks the segment's entries immediately, so threads do
not wait for each other. Results do not depend on the number of threads: the chunks do not, and a segment's candidates
are read in the order of its chunks.

This module imports Numba, as do ``cpu``, ``loops``, ``simd``, ``threads`` and ``compile``: load them on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, types, uint32
from numba.extending import register_jitable

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import TYPE_CODES, SegmentWork, Selection, type_code
from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.simd import (
    AHEAD,
    LANES,
    add,
    at_address,
    bits_of,
    count_bits,
    fetch_add,
    float_of,
    from_half,
    load,
    load_half,
    lowest_bit,
    multiply,
    prefetch,
    reaching,
    splat,
    splat_key,
    store,
)
from dgc.core.kernels.threads import Team
from dgc.core.kernels.threshold import ENOUGH
from dgc.core.layout import FLOAT_TYPES

# -- a bucket's work as two tables of numbers, because kernels cannot read Python objects ------------------------------
# S segments. The tables hold addresses of arrays, so that one compiled kernel serves every mix of types without copies.

# Columns of the (S, 12) int64 table that Python fills.
GRADIENT, GRADIENT_TYPE, PARAMETER, PARAMETER_TYPE, OFFSET, LENGTH, ENTRIES, FORM = range(8)
# Columns that a kernel fills: the threshold's bits, the most candidates, the first chunk, the first output position.
KEY, MOST, FIRST_CHUNK, OUT = range(8, 12)
INTEGERS = 12

# Columns of the (S, 4) float64 table. A kernel fills USED, the threshold of this pass.
MOMENTUM, DECAY, SCALE, USED = range(4)
REALS = 4

FLOAT32, FLOAT64, FLOAT16 = (TYPE_CODES[FLOAT_TYPES[name]] for name in ("float32", "float64", "float16"))
NO_MOMENTUM, HEAVY_BALL, NESTEROV = range(3)  # forms of momentum

_FLOAT32 = FLOAT_TYPES["float32"]


def address_of(array: np.ndarray) -> int:
    """Return the address of a contiguous array's first element; ``array.ctypes`` takes four times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def place_of(array: np.ndarray, length: int, what: str) -> tuple[int, int]:
    """Return address and type code of a 1-D array of ``length`` elements."""
    # Test the common case first: a pass over memory has displaced the code of further tests from the caches.
    if array.dtype is _FLOAT32 and array.shape == (length,) and array.flags.carray and length:
        return address_of(array), FLOAT32
    return address_of(array), type_code(array, length, what)


def make_table(work: Sequence[SegmentWork]) -> tuple[np.ndarray, np.ndarray]:
    """Return the (S, 12) int64 and (S, 4) float64 tables of a bucket's work."""
    given: list[int] = []
    reals: list[float] = []
    for w in work:
        length, decay, place = w.length, w.weight_decay, (0, 0)
        if decay and w.parameter is not None:
            place = place_of(w.parameter, length, "parameter")
        m = w.momentum
        form = (NESTEROV if w.nesterov else HEAVY_BALL) if m else NO_MOMENTUM
        given += place_of(w.gradient, length, "gradient")
        given += place
        given += (w.offset, length, min(w.k, length), form)
        reals += (m, decay, w.scale, 0.0)
    integers = np.zeros((len(work), INTEGERS), np.int64)
    integers[:, :KEY] = np.array(given, np.int64).reshape(len(work), KEY)
    return integers, np.array(reals, np.float64).reshape(len(work), REALS)


# -- one chunk ---------------------------------------------------------------------------------------------------------
# A pass moves 20 bytes per float32 element: it reads g, u and v once, and writes u and v once. It updates LANES entries
# at a time in registers, and compares them with the threshold. The comparison gives a mask of LANES bits; only a mask
# other than 0 (one in ten at a density of 0.1 %) costs a branch. Infinity is above every threshold, so the same mask
# reveals a block that is not finite before it is stored. Such a block is computed again, entry by entry.

STRIP = 4096  # convert this many elements of another type at a time, so that they stay in the first two caches

_UINT64_1 = np.uint64(1)


# The bits of a float32 without its sign, and the bits of infinity.
MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000


@helper
def key_of(value: float, like: np.ndarray) -> int:
    """Return the bits of a magnitude in float32; ``like`` is (1,) float32 scratch."""
    like[0] = value
    return np.int64(bits_of(like)[0])  # type: ignore[return-value]


@helper
def value_of(key: int, like: np.ndarray) -> float:
    """Return the magnitude with the bits ``key``, in float64."""
    bits_of(like)[0] = key
    return np.float64(like[0])


@helper
def _entry_by_entry(form, decays, g, g0, p, p0, u, v, bits, start, stop, m, decay, scale):
    """Update elements ``start`` to ``stop``; return whether an entry was not finite. Such entries of G count as 0.

    If a sum of finite values is infinite, u and v keep their values.
    """
    nonfinite = False
    for i in range(start, stop):
        x = g[i - g0] * scale
        if decays:
            x += p[i - p0] * decay
        # v[i] holds x for a moment, so that the bits of x can be read.
        old = v[i]
        v[i] = x
        if bits[i] & MAGNITUDE >= INFINITY:
            nonfinite = True
            x = np.float32(0)
        if form == NO_MOMENTUM:
            velocity = x
            v[i] = old + x
        else:
            velocity = m * u[i] + x
            v[i] = old + (x + m * velocity) if form == NESTEROV else old + velocity
        if bits[i] & MAGNITUDE >= INFINITY:
            nonfinite = True
            v[i] = old
        elif form != NO_MOMENTUM:
            u[i] = velocity
    return nonfinite


@helper
def _sweep(form, decays, g, g0, p, p0, u, v, bits, start, stop, m, decay, scale, key, positions, values, n, full):
    """Update elements ``start`` to ``stop``; append those that reach ``key``, from index n on, while n <= ``full``.

    g and p begin at the bucket's positions g0 and p0. Returns the new n, and whether an entry was not finite.
    """
    ms, decays_, scales = splat(m), splat(decay), splat(scale)
    keys, infinities = splat_key(key), splat_key(INFINITY)
    nonfinite = False
    i = start
    while i + LANES <= stop:
        prefetch(g, i - g0 + AHEAD)
        prefetch(v, i + AHEAD)
        if form != NO_MOMENTUM:
            prefetch(u, i + AHEAD)
        if decays:
            prefetch(p, i - p0 + AHEAD)
        x = multiply(load(g, i - g0), scales)
        if decays:
            x = add(x, multiply(load(p, i - p0), decays_))
        if form == NO_MOMENTUM:
            velocity = x
            y = add(load(v, i), x)
        else:
            velocity = add(multiply(ms, load(u, i)), x)
            y = add(load(v, i), add(x, multiply(ms, velocity)) if form == NESTEROV else velocity)
        found = reaching(y, keys)
        if found != 0 and reaching(y, infinities) != 0:
            nonfinite |= _entry_by_entry(form, decays, g, g0, p, p0, u, v, bits, i, i + LANES, m, decay, scale)
            found = reaching(load(v, i), keys)
        else:
            store(v, i, y)
            if form != NO_MOMENTUM:
                store(u, i, velocity)
        if found != 0 and n <= full:
            while found != 0:
                j = i + lowest_bit(found)
                positions[n] = j
                values[n] = v[j]
                n += 1
                found &= found - _UINT64_1
        i += LANES
    if i < stop:
        nonfinite |= _entry_by_entry(form, decays, g, g0, p, p0, u, v, bits, i, stop, m, decay, scale)
        if n <= full:
            for j in range(i, stop):
                if bits[j] & MAGNITUDE >= key:
                    positions[n] = j
                    values[n] = v[j]
                    n += 1
    return n, nonfinite


@helper
def widen(address, code, start, count, out):
    """Convert ``count`` elements to float32, from index ``start`` of the array of type ``code`` at ``address``."""
    # Slices make indices start at 0. An index that might be negative would cost a branch in each loop.
    out = out[:count]
    if code == FLOAT32:
        single = carray(at_address(address), (start + count,), types.float32)[start:]
        for i in range(count):
            out[i] = single[i]
    elif code == FLOAT64:
        double = carray(at_address(address), (start + count,), types.float64)[start:]
        for i in range(count):
            out[i] = double[i]
    else:
        words = carray(at_address(address), (start + count,), types.uint16)[start:]
        if code == FLOAT16:
            whole = count // LANES * LANES
            for i in range(0, whole, LANES):
                store(out, i, load_half(words, i))
            for i in range(whole, count):
                out[i] = from_half(words[i])
        else:
            for i in range(count):
                out[i] = float_of(uint32(words[i]) << uint32(16))


@helper
def sweep_chunk(integers, reals, s, start, stop, u, v, bits, key, wide, positions, values, n, full):
    """Update elements ``start`` to ``stop`` of segment s, like ``_sweep``; ``wide`` is (2 * STRIP,) scratch."""
    offset, length = integers[s, OFFSET], integers[s, LENGTH]
    form, decays = integers[s, FORM], integers[s, PARAMETER] != 0
    m, decay, scale = np.float32(reals[s, MOMENTUM]), np.float32(reals[s, DECAY]), np.float32(reals[s, SCALE])
    g_direct = integers[s, GRADIENT_TYPE] == FLOAT32
    p_direct = not decays or integers[s, PARAMETER_TYPE] == FLOAT32
    gradient = carray(at_address(integers[s, GRADIENT]), (length,), types.float32)
    parameter = carray(at_address(integers[s, PARAMETER]), (length,), types.float32)
    step = stop - start if g_direct and p_direct else STRIP
    nonfinite = False
    for low in range(start, stop, step):
        high = min(low + step, stop)
        g, g0, p, p0 = gradient, offset, parameter, offset
        if not g_direct:
            g, g0 = wide[:STRIP], offset + low
            widen(integers[s, GRADIENT], integers[s, GRADIENT_TYPE], low, high - low, g)
        if not p_direct:
            p, p0 = wide[STRIP:], offset + low
            widen(integers[s, PARAMETER], integers[s, PARAMETER_TYPE], low, high - low, p)
        n, met = _sweep(
            form, decays, g, g0, p, p0, u, v, bits, offset + low, offset + high,
            m, decay, scale, key, positions, values, n, full,
        )  # fmt: skip
        nonfinite |= met
    return n, nonfinite


# -- the choice among candidates ---------------------------------------------------------------------------------------
# Each chunk has left a run of candidates in ascending order of position. Magnitudes are compared by their bits, called
# keys. The k largest are picked without sorting: a partition of the candidates' keys gives the k-th largest key, and a
# second loop over the candidates writes the entries in order.


@helper
def _order_statistic(keys, place):
    """Return the key at index ``place`` of the sorted keys; reorders ``keys`` (Hoare's selection).

    Numba's np.partition would do the same, but takes a third of the time that all kernels take to compile.
    """
    low, high = 0, keys.size - 1
    while low < high:
        a, b, c = keys[low], keys[(low + high) >> 1], keys[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return keys[place]


@helper
def kth_key(bits, starts, counts, first, last, total, k):
    """Return the k-th largest key, and how many entries with this key are among the k largest.

    Of entries with equal keys, the first ones are picked.
    """
    keys, n = np.empty(total, np.int32), 0
    for c in range(first, last):
        for i in range(starts[c], starts[c] + counts[c]):
            keys[n] = bits[i] & MAGNITUDE
            n += 1
    key = np.int64(_order_statistic(keys, total - k))
    greater = 0
    for each in keys:
        greater += each > key
    return key, k - greater


@helper
def write_largest(positions, values, bits, starts, counts, first, last, key, ties, k, out_positions, out_values, place):
    """Write k candidates in order from ``place`` on: those above ``key``, and the first ``ties`` equal to it."""
    n, end = place, place + k
    for c in range(first, last):
        for i in range(starts[c], starts[c] + counts[c]):
            if n == end:
                return
            # Write every candidate, but advance n only if the entry is to be kept: this needs no branch.
            out_positions[n] = positions[i]
            out_values[n] = values[i]
            candidate = bits[i] & MAGNITUDE
            tie = np.int64(candidate == key) & np.int64(ties > 0)
            ties -= tie
            n += np.int64(candidate > key) | tie


CHUNK = 131072  # a thread takes this many elements at a time; a multiple of LANES

# This replaces a count if a segment's candidates were too many or too few, or were not collected.
UNFINISHED = -1

# The rules are plain Python, for every backend. Registering them lets kernels call them.
for _rule in (rules.threshold, rules.most_candidates, rules.estimate, rules.learn):
    register_jitable(_rule)


@helper
def _learn(row, k, used, count, kth):
    """Call the rule. As a helper it is compiled only once, not for each kernel that calls it."""
    rules.learn(row, k, used, count, kth)


@entry
def prepare(integers, reals, thresholds, selecting):
    """Fill the columns of the work tables that depend on the thresholds.

    Returns:
        Four numbers: chunks, candidates that one thread may hold, entries to select, and elements.
    """
    chunks, room, out, elements, like = 0, 0, 0, 0, np.empty(1, np.float32)
    for s in range(len(integers)):
        length, k = integers[s, LENGTH], integers[s, ENTRIES]
        used = rules.threshold(thresholds[s], k, length) if selecting else np.inf
        key = max(key_of(used, like), 1)
        integers[s, KEY] = key
        reals[s, USED] = like[0] if key > 1 else 0.0
        integers[s, FIRST_CHUNK] = chunks
        chunks += (length + CHUNK - 1) // CHUNK
        elements += length
        integers[s, MOST] = rules.most_candidates(k, length) if used < np.inf else 0
        if used < np.inf:
            room += integers[s, MOST] + LANES
        integers[s, OUT] = out
        if selecting:
            out += k
    return chunks, room + LANES, out, elements


@entry
def begin(integers, chunk_table, left, spent):
    """Fill the scratch arrays of :func:`compress_chunks` for its first chunk."""
    for s in range(len(integers)):
        spent[:, s] = 0
        left[s] = (integers[s, LENGTH] + CHUNK - 1) // CHUNK
        for c in range(left[s]):
            chunk_table[0, integers[s, FIRST_CHUNK] + c] = s


@helper
def _conclude(integers, reals, thresholds, s, positions, values, bits, starts, counts, like, out_positions, out_values):
    """Pick the entries of segment s among its candidates; return their number, or UNFINISHED."""
    k, key = integers[s, ENTRIES], integers[s, KEY]
    if k == 0:
        return 0
    if key >= INFINITY:
        return UNFINISHED
    length, used = integers[s, LENGTH], reals[s, USED]
    first = integers[s, FIRST_CHUNK]
    last = first + (length + CHUNK - 1) // CHUNK
    total: Any = np.int64(0)  # a plain 0 has another type: the functions below would be compiled again for it
    for c in range(first, last):
        if counts[c] < 0:
            return UNFINISHED
        total += counts[c]
    if total > integers[s, MOST]:
        return UNFINISHED
    # With threshold 0, all entries but zeros are candidates, even if they are fewer than k.
    if total < k and used > 0.0 and total < ENOUGH * k:
        return UNFINISHED
    if total <= k:
        kth_bits, ties = np.int64(0), np.int64(0)  # pick all candidates
        kth = rules.estimate(thresholds[s], k, used, total) if used > 0.0 else 0.0
    if total >= k:
        kth_bits, ties = kth_key(bits, starts, counts, first, last, total, k)
        kth = value_of(kth_bits, like)
    write_largest(
        positions, values, bits, starts, counts, first, last, kth_bits, ties, min(total, k), out_positions, out_values,
        integers[s, OUT],
    )  # fmt: skip
    _learn(thresholds[s], k, used, total, kth)
    return min(total, k)


@entry
def compress_chunks(
    worker, progress, chunks, integers, reals, thresholds, u, v, selecting, room, chunk_table, left,
    positions, values, spent, nonfinite, taken, out_positions, out_values,
):  # fmt: skip
    """Update u and v. With ``selecting``, pick the entries of all segments whose candidates suffice.

    A kernel for :class:`dgc.core.kernels.threads.Team`, with C chunks as pieces and W threads.

    Args:
        worker: this thread's number, below W.
        progress: (2,) int64: chunks taken, chunks done.
        chunks: C.
        integers: (S, 12) int64 work table, prepared.
        reals: (S, 4) float64 work table, prepared.
        thresholds: (S, COLUMNS) float64, updated.
        u: float32, in place.
        v: float32, in place.
        selecting: False only updates u and v.
        room: candidates that one thread may hold.
        chunk_table: (3, >= C) int64 scratch: each chunk's segment, the index of its first candidate, and their number.
        left: (>= S,) int64 scratch: chunks of each segment that are not done.
        positions: (>= W * room,) int32 scratch.
        values: (>= W * room,) float32 scratch.
        spent: (>= W, >= S) int64 scratch: candidates of each segment that each thread holds.
        nonfinite: (W,) int64, set to 1 if the thread met an entry that is not finite.
        taken: (S,) int64, set to the number of entries picked, or UNFINISHED.
        out_positions: (k,) int64; segment s fills its part, which begins at the index in its column OUT.
        out_values: (k,) float32, filled in the same way.
    """
    chunk_segment, starts, counts = chunk_table[0], chunk_table[1], chunk_table[2]
    v_bits, value_bits = bits_of(v), bits_of(values)
    wide, like = np.empty(2 * STRIP, np.float32), np.empty(1, np.float32)
    n = worker * room
    while True:
        c = fetch_add(progress, 0, 1)
        if c >= chunks:
            break
        s = chunk_segment[c]
        start = (c - integers[s, FIRST_CHUNK]) * CHUNK
        stop = min(start + CHUNK, integers[s, LENGTH])
        # If one thread finds more candidates than this, the segment has too many, whatever other threads find.
        allowed = integers[s, MOST] - spent[worker, s]
        key = integers[s, KEY] if allowed >= 0 else INFINITY
        first = n
        n, met = sweep_chunk(
            integers, reals, s, start, stop, u, v, v_bits, key, wide, positions, values, n, n + allowed
        )
        if met:
            nonfinite[worker] = 1
        found = n - first
        if found > allowed:
            found, n = UNFINISHED, first
            spent[worker, s] = integers[s, MOST] + 1
        else:
            spent[worker, s] += found
        starts[c], counts[c] = first, found
        if fetch_add(left, s, -1) == 1 and selecting:
            taken[s] = _conclude(
                integers, reals, thresholds, s, positions, values, value_bits, starts, counts, like, out_positions,
                out_values,
            )  # fmt: skip
        fetch_add(progress, 1, 1)


def chosen(
    integers: np.ndarray, taken: np.ndarray, positions: np.ndarray, values: np.ndarray, nonfinite: bool
) -> Selection:
    """Return the entries that were picked; a segment may have picked fewer than it has room for."""
    if int(taken.sum()) < positions.size:
        inside = [slice(out, out + n) for out, n in zip(integers[:, OUT], taken, strict=True)]
        positions, values = np.concatenate([positions[i] for i in inside]), np.concatenate([values[i] for i in inside])
    return Selection(positions, nonfinite, values)


class Scratch:
    """Scratch arrays of the pass over a bucket."""

    def __init__(self, workers: int, segments: int, chunks: int, room: int) -> None:
        self.sizes = (workers, segments, chunks, workers * room)
        self.chunks = np.empty((3, chunks), np.int64)
        self.left = np.empty(segments, np.int64)
        self.spent = np.empty((workers, segments), np.int64)
        self.positions = np.empty(workers * room, np.int32)
        self.values = np.empty(workers * room, np.float32)


class Workspace(threading.local):
    """Scratch arrays that a Python thread keeps from call to call."""

    def __init__(self) -> None:
        self.kept: list[Scratch] = []  # scratch arrays that are not in use; a borrower puts them back

    def borrow(self, workers: int, segments: int, chunks: int, room: int) -> Scratch:
        """Return unused scratch arrays of at least these sizes."""
        if self.kept:
            scratch = self.kept.pop()
            w, s, c, r = scratch.sizes
            if workers <= w and segments <= s and chunks <= c and workers * room <= r:
                return scratch
            workers, segments, chunks = max(workers, w), max(segments, s), max(chunks, c)
            room = max(room, -(-r // workers))
        return Scratch(workers, segments, chunks, room)


# -- the choice among all entries, if a threshold does not help --------------------------------------------------------
# This is a radix selection on the bits of ``|v|``. Histograms of BINS bins, from the top bits down, give the k-th
# largest magnitude, and another pass writes the entries in order. A few passes suffice for any values, and they only
# read v (4 bytes per element). At a density of 25 %, a search among candidates would make a step take twice as long.

BINS = 2048
_ALL_LANES = np.uint64(0xFFFFFFFFFFFFFFFF)


@helper
def _count(v, bits, key):
    """Return how many entries reach ``key``."""
    keys, count = splat_key(key), 0
    whole = v.size // LANES * LANES
    for i in range(0, whole, LANES):
        count += count_bits(reaching(load(v, i), keys))
    for i in range(whole, v.size):
        count += (bits[i] & MAGNITUDE) >= key
    return count


@helper
def _tally(v, bits, low, high, shift, bins):
    """Count the keys from ``low`` to ``high`` in bins, by ``(key - low) >> shift``."""
    bins[:] = 0
    if low == 0 and high == MAGNITUDE:
        for i in range(v.size):
            bins[(bits[i] & MAGNITUDE) >> shift] += 1
        return
    # The successor of the largest key would be negative; no key is above it.
    lows, highs = splat_key(low), splat_key(min(high, MAGNITUDE - 1) + 1)
    unlimited = _ALL_LANES if high == MAGNITUDE else np.uint64(0)
    whole = v.size // LANES * LANES
    for i in range(0, whole, LANES):
        x = load(v, i)
        found = reaching(x, lows) & (~reaching(x, highs) | unlimited)
        while found != 0:
            bins[((bits[i + lowest_bit(found)] & MAGNITUDE) - low) >> shift] += 1
            found &= found - _UINT64_1
    for i in range(whole, v.size):
        key = bits[i] & MAGNITUDE
        if low <= key and key <= high:
            bins[(key - low) >> shift] += 1


@helper
def _kth_key_of_all(v, bits, k, bins):
    """Return the same as ``kth_key``, but for all entries. More than k entries must differ from 0."""
    low: Any = np.int64(0)
    high: Any = np.int64(MAGNITUDE)
    wanted = k
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
def _write_selected(v, bits, key, ties, offset, out_positions, out_values):
    """Fill the outputs with the entries above ``key`` and the first ``ties`` equal to it, in order."""
    n, i = 0, 0
    keys = splat_key(max(key, 1))
    while n < out_positions.size:
        last = i + LANES > v.size
        found = np.uint64((bits[i] & MAGNITUDE) >= max(key, 1)) if last else reaching(load(v, i), keys)
        while found != 0 and n < out_positions.size:
            j = i + lowest_bit(found)
            found &= found - _UINT64_1
            tie = (bits[j] & MAGNITUDE) == key
            if not tie or ties > 0:
                out_positions[n] = offset + j
                out_values[n] = v[j]
                n += 1
            ties -= tie
        i += 1 if last else LANES


@entry
def select_whole(worker, progress, count, v, integers, thresholds, which, out_positions, out_values, taken):
    """Pick the entries of the segments ``which``, (count,), among all their entries; a segment is one piece.

    A kernel for ``Team``; other arguments as for :func:`compress_chunks`.
    """
    all_bits, bins, like = bits_of(v), np.empty(BINS, np.int64), np.empty(1, np.float32)
    while True:
        ticket = fetch_add(progress, 0, 1)
        if ticket >= count:
            break
        s = which[ticket]
        start, k, out = integers[s, OFFSET], integers[s, ENTRIES], integers[s, OUT]
        # Slices make indices start at 0. An index that might be negative would cost a branch in each loop.
        own, bits = v[start : start + integers[s, LENGTH]], all_bits[start : start + integers[s, LENGTH]]
        nonzero = _count(own, bits, np.int64(1))
        key, ties, kth, reached = 0, 0, 0.0, 0
        if nonzero > k:
            key, ties = _kth_key_of_all(own, bits, k, bins)
            kth = value_of(key, like)
            reached = _count(own, bits, key_of(rules.WIDER * kth, like))
        taken[s] = min(k, nonzero)
        _write_selected(
            own, bits, key, ties, start, out_positions[out : out + taken[s]], out_values[out : out + taken[s]]
        )
        _learn(thresholds[s], k, rules.WIDER * kth, reached, kth)
        fetch_add(progress, 1, 1)


# -- the choice for a device, which finds the candidates itself --------------------------------------------------------


@entry
def _choose(integers, reals, thresholds, positions, values, starts, counts, taken, out_positions, out_values):
    bits, like = bits_of(values), np.empty(1, np.float32)
    for s in range(len(integers)):
        taken[s] = _conclude(
            integers, reals, thresholds, s, positions, values, bits, starts, counts, like, out_positions, out_values
        )


class Choice:
    """The choice of one bucket's entries in one step.

    Attributes:
        limits: (S,) float64, the least magnitude of each segment's candidates; infinity to collect none.
        most: (S,) int64, how many candidates of each segment are kept. If there are more, none of them is used.
        room: the sum of ``most``.
    """

    def __init__(self, work: Sequence[SegmentWork], thresholds: np.ndarray) -> None:
        """Prepare to choose entries in one pass. The thresholds, (S, COLUMNS), are updated later."""
        self._thresholds = thresholds
        self._integers, self._reals = np.zeros((len(work), INTEGERS), np.int64), np.zeros((len(work), REALS))
        self._integers[:, OFFSET] = [w.offset for w in work]
        self._integers[:, LENGTH] = [w.length for w in work]
        self._integers[:, ENTRIES] = [max(0, min(w.k, w.length)) for w in work]
        _, _, k, _ = prepare(self._integers, self._reals, thresholds, True)
        self.most = self._integers[:, MOST]
        self.limits = np.where(self.most > 0, self._reals[:, USED], np.inf)
        self.room = int(self.most.sum())
        self._positions, self._values = np.empty(k, np.int64), np.empty(k, np.float32)
        self._taken = np.full(len(work), UNFINISHED)

    def among(self, places: np.ndarray, values: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Choose among candidates; return the numbers of the segments that need :meth:`among_all`.

        Args:
            places: (n,) int32 positions in the bucket, in any order.
            values: (n,) float32.
            totals: (S,) how many candidates each segment had, including those that were not kept.
        """
        order = np.argsort(places)
        places, values = places[order], values[order]
        # A device leaves one run of candidates per segment, the CPU one per chunk.
        offsets, lengths = self._integers[:, OFFSET], self._integers[:, LENGTH]
        chunks = -(-lengths // CHUNK)
        first = np.cumsum(chunks) - chunks
        starts, counts = np.zeros(int(chunks.sum()), np.int64), np.zeros(int(chunks.sum()), np.int64)
        used = lengths > 0
        starts[first[used]] = np.searchsorted(places, offsets[used])
        counts[first[used]] = np.searchsorted(places, offsets[used] + lengths[used]) - starts[first[used]]
        counts[first[used & (totals > self.most)]] = UNFINISHED
        _choose(
            self._integers, self._reals, self._thresholds, places, values, starts, counts, self._taken,
            self._positions, self._values,
        )  # fmt: skip
        return np.flatnonzero(self._taken == UNFINISHED)

    def span(self, which: np.ndarray) -> slice:
        """Return the slice of the bucket from the first to the last of these segments."""
        offsets = self._integers[which, OFFSET]
        return slice(int(offsets[0]), int(offsets[-1] + self._integers[which[-1], LENGTH]))

    def among_all(self, which: np.ndarray, v: np.ndarray, team: Team, threads: int) -> None:
        """Choose among all entries of these segments; ``v`` holds the elements of their :meth:`span`."""
        start = self.span(which).start
        integers = self._integers.copy()
        integers[:, OFFSET] -= start
        team.run(
            threads, select_whole, which.size, v, integers, self._thresholds, which, self._positions, self._values,
            self._taken,
        )  # fmt: skip
        for s in which:
            out = integers[s, OUT]
            self._positions[out : out + self._taken[s]] += start

    def selection(self, nonfinite: bool) -> Selection:
        """Return the chosen entries of all segments, in order."""
        return chosen(self._integers, self._taken, self._positions, self._values, nonfinite)
