"""The compress pass of one bucket: all chunks of all segments, shared out to the threads; the last to finish picks.

A chunk is a piece of one segment. Threads take chunks by ticket and write candidates into room of their own. Whoever
finishes a segment's last chunk picks its entries at once, so no thread waits for another in between. Chunks do not
depend on the number of threads and a segment's candidates are read in the order of its chunks, so neither do results.

Candidates lie in runs (one for each chunk of the segment), each in ascending order of position. Magnitudes are compared
as the bits of ``|v|``, called keys. Exactly the k largest are picked without sorting: a partition of the candidates'
keys gives the k-th largest, and one more walk over the candidates writes the entries, in order.
"""

from __future__ import annotations

import threading

import numpy as np
from numba.extending import register_jitable

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.cpu.accumulate import STRIP, infinity_key, key_of, magnitude_mask, sweep_chunk, value_of
from dgc.core.kernels.cpu.simd import LANES, bits_of, fetch_add
from dgc.core.kernels.cpu.work_table import ENTRIES, FIRST_CHUNK, KEY, LENGTH, MOST, OUT, USED
from dgc.core.kernels.threshold import ENOUGH


@helper
def _order_statistic(keys, place):
    """The key that would stand at ``place`` if ``keys`` were sorted; reorders them (Hoare's selection).

    Numba's own np.partition gives the same and takes a third of the whole compile time.
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
    """The k-th largest key of the candidates, and how many entries of just that key are among the k largest.

    Args:
        bits: the candidates' values as integers; run c is ``bits[starts[c] : starts[c] + counts[c]]``.
        starts: (chunks,) int64, as is ``counts``.
        counts: see starts.
        first: the segment's first run.
        last: the run after its last one.
        total: number of candidates.
        k: 0 < k <= total.

    Returns:
        (key, ties): all keys above ``key`` belong to the k largest, and the first ``ties`` equal to it.
    """
    mask, keys, n = magnitude_mask(bits.itemsize), np.empty(total, bits.dtype), 0
    for c in range(first, last):
        for i in range(starts[c], starts[c] + counts[c]):
            keys[n] = bits[i] & mask
            n += 1
    key = np.int64(_order_statistic(keys, total - k))
    greater = 0
    for each in keys:
        greater += each > key
    return key, k - greater


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


CHUNK = 131072
"""Elements that a thread takes at a time; a multiple of LANES."""

UNFINISHED = -1
"""In place of a count: the segment's candidates were too many or too few, or it collected none."""

# The rules are plain Python, for every backend; this lets kernels call them by name.
for _rule in (rules.threshold, rules.most_candidates, rules.estimate, rules.learn, rules.log2, rules.exp2):
    register_jitable(_rule)


@entry()
def prepare(integers, reals, thresholds, selecting, like):
    """Fill the columns of the work tables that depend on the thresholds.

    Args:
        integers: (S, 13) int64, in place.
        reals: (S, 4) float64, in place.
        thresholds: (S, COLUMNS) float64; not read when nothing is selected.
        selecting: whether entries are to be selected.
        like: (1,) float32 or float64, scratch of the state's type.

    Returns:
        Number of chunks, room for the candidates of one thread, number of entries to select, number of elements.
    """
    chunks, room, out, elements = 0, 0, 0, 0
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


@entry()
def begin(integers, chunk_table, left, spent, nonfinite, taken):
    """Set the scratch arrays of :func:`compress_chunks` up; for their meaning see there."""
    nonfinite[:] = 0
    taken[:] = 0
    for s in range(len(integers)):
        spent[:, s] = 0
        left[s] = (integers[s, LENGTH] + CHUNK - 1) // CHUNK
        for c in range(left[s]):
            chunk_table[0, integers[s, FIRST_CHUNK] + c] = s


@entry()
def outcome(taken, nonfinite):
    """Sum up what :func:`compress_chunks` left behind; in NumPy each of these starts with cold caches.

    Returns:
        Whether a segment is UNFINISHED, the number of entries picked, and whether a non-finite entry was met.
    """
    unfinished, total, met = False, 0, False
    for n in taken:
        unfinished |= n == UNFINISHED
        total += n
    for n in nonfinite:
        met |= n != 0
    return unfinished, total, met


@helper
def _conclude(integers, reals, thresholds, s, positions, values, bits, starts, counts, like, out_positions, out_values):
    """Pick segment s among its candidates; returns how many entries, or UNFINISHED."""
    k, key = integers[s, ENTRIES], integers[s, KEY]
    if k == 0:
        return 0
    if key >= infinity_key(like.itemsize):
        return UNFINISHED
    length, used = integers[s, LENGTH], reals[s, USED]
    first = integers[s, FIRST_CHUNK]
    last = first + (length + CHUNK - 1) // CHUNK
    total = 0
    for c in range(first, last):
        if counts[c] < 0:
            return UNFINISHED
        total += counts[c]
    if total > integers[s, MOST]:
        return UNFINISHED
    # At threshold 0 all non-zero entries are there: fewer than k is then the whole truth.
    if total < k and used > 0.0 and total < ENOUGH * k:
        return UNFINISHED
    if total <= k:
        write_all(positions, values, starts, counts, first, last, out_positions, out_values, integers[s, OUT])
        kth = rules.estimate(thresholds[s], k, used, total) if used > 0.0 else 0.0
    if total >= k:
        kth_bits, ties = kth_key(bits, starts, counts, first, last, total, k)
        kth = value_of(kth_bits, like)
        if total > k:
            write_largest(
                positions, values, bits, starts, counts, first, last, kth_bits, ties, k, out_positions, out_values,
                integers[s, OUT],
            )  # fmt: skip
    rules.learn(thresholds[s], k, used, total, kth)
    return min(total, k)


@entry()
def compress_chunks(
    worker, progress, chunks, integers, reals, thresholds, u, v, selecting, room, chunk_table, left,
    positions, values, spent, nonfinite, taken, out_positions, out_values,
):  # fmt: skip
    """Update u and v, and with ``selecting`` pick the entries of all segments whose candidates suffice.

    A kernel for :class:`dgc.core.kernels.cpu.threads.Team`, W threads.

    Args:
        worker: this thread's number, below W.
        progress: (2,) int64: chunks taken, chunks done.
        chunks: C, number of chunks.
        integers: (S, 13) int64 work table, prepared.
        reals: (S, 4) float64 work table, prepared.
        thresholds: (S, COLUMNS) float64, updated.
        u: (·,) float32 or float64, in place.
        v: (·,) of u's type, in place.
        selecting: False updates only.
        room: candidates that one thread may hold.
        chunk_table: (3, >= C) int64 scratch: each chunk's segment, its first candidate's place, its candidates.
        left: (>= S,) int64 scratch: chunks of each segment that are not done.
        positions: (>= W * room,) int32 scratch.
        values: (>= W * room,) of u's type, scratch.
        spent: (>= W, >= S) int64 scratch: candidates that each thread holds of each segment.
        nonfinite: (W,) int64, receives 1 where a thread met a non-finite entry.
        taken: (S,) int64, receives the number of entries picked, or UNFINISHED.
        out_positions: (k,) int64; segment s fills its part from its OUT on.
        out_values: (k,) of u's type, likewise.
    """
    chunk_segment, starts, counts = chunk_table[0], chunk_table[1], chunk_table[2]
    v_bits, value_bits = bits_of(v), bits_of(values)
    wide, like = np.empty(2 * STRIP, v.dtype), np.empty(1, v.dtype)
    n = worker * room
    while True:
        c = fetch_add(progress, 0, 1)
        if c >= chunks:
            break
        s = chunk_segment[c]
        start = (c - integers[s, FIRST_CHUNK]) * CHUNK
        stop = min(start + CHUNK, integers[s, LENGTH])
        # More than this from one thread alone is too many for the segment, whatever the others find.
        allowed = integers[s, MOST] - spent[worker, s]
        key = integers[s, KEY] if allowed >= 0 else infinity_key(v.itemsize)
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


def without_gaps(
    integers: np.ndarray, taken: np.ndarray, positions: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of all segments, where some have picked fewer than there is room for."""
    inside = [slice(out, out + n) for out, n in zip(integers[:, OUT], taken, strict=True)]
    return np.concatenate([positions[i] for i in inside]), np.concatenate([values[i] for i in inside])


class Scratch:
    """Scratch arrays of the pass over a bucket, of at least the sizes asked for."""

    def __init__(self, kind: np.dtype, workers: int, segments: int, chunks: int, room: int) -> None:
        self.sizes = (workers, segments, chunks, workers * room)
        self.chunks = np.empty((3, chunks), np.int64)
        self.left = np.empty(segments, np.int64)
        self.spent = np.empty((workers, segments), np.int64)
        self.positions = np.empty(workers * room, np.int32)
        self.values = np.empty(workers * room, kind)


class Workspace(threading.local):
    """What a Python thread keeps from call to call: it grows, and stays."""

    def __init__(self) -> None:
        self._scratch: dict[np.dtype, list[Scratch]] = {}

    def borrow(self, kind: np.dtype, workers: int, segments: int, chunks: int, room: int) -> Scratch:
        """Return scratch arrays for buckets of type ``kind`` that have no other user, grown when they are too small."""
        kept = self._scratch.setdefault(kind, [])
        if kept:
            scratch = kept.pop()
            w, s, c, r = scratch.sizes
            if workers <= w and segments <= s and chunks <= c and workers * room <= r:
                return scratch
            workers, segments, chunks = max(workers, w), max(segments, s), max(chunks, c)
            room = max(room, -(-r // workers))
        return Scratch(kind, workers, segments, chunks, room)

    def give_back(self, kind: np.dtype, scratch: Scratch) -> None:
        """Keep scratch arrays for the next call."""
        self._scratch.setdefault(kind, []).append(scratch)
