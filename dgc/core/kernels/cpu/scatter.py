"""Work at the k selected places: mask, and the sum of messages into results.

k entries; positions are ascending and unique, so threads that take disjoint parts of them never meet. All are kernels
for :class:`dgc.core.kernels.cpu.threads.Team`: ``worker`` is the thread's number, ``progress`` (2,) int64 counts the
parts of PART entries that were taken and that are done, ``parts`` is how many there are.
"""

from __future__ import annotations

from numba import carray

from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.cpu.simd import at_address, fetch_add, prefetch_entry

PART = 4096
"""Entries that a thread takes at a time."""

SOON = 16
"""Entries between the one that is worked on and the one whose places in u and v are asked for."""


@entry()
def mask(worker, progress, parts, u, v, positions, decoded, masking):
    """``v[positions] -= decoded``, and ``u[positions] = 0`` with masking."""
    while True:
        part = fetch_add(progress, 0, 1)
        if part >= parts:
            break
        for i in range(part * PART, min((part + 1) * PART, positions.size)):
            if i + SOON < positions.size:
                prefetch_entry(v, positions[i + SOON])
                prefetch_entry(u, positions[i + SOON])
            p = positions[i]
            v[p] -= decoded[i]
            if masking:
                u[p] = 0
        fetch_add(progress, 1, 1)


@helper
def _add_part(addresses, lengths, offsets, positions, values, factor, first, last):
    s = 0
    i = first
    while i < last:
        p = positions[i]
        # The segment that holds p, by bisection; the next entries are mostly in the same one.
        s, high = 0, len(lengths)
        while high - s > 1:
            middle = (s + high) // 2
            if offsets[middle] <= p:
                s = middle
            else:
                high = middle
        start = offsets[s]
        stop = start + lengths[s]
        result = carray(at_address(addresses[s]), (lengths[s],), values.dtype)
        if p < start or p >= stop:
            return False
        while i < last and positions[i] < stop:
            if positions[i] < start:
                return False
            result[positions[i] - start] += values[i] * factor
            i += 1
    return True


@entry()
def scatter_add(worker, progress, parts, addresses, lengths, offsets, positions, values, factor, refused):
    """Add ``values * factor`` at ``positions`` to S results.

    Args:
        worker: see above.
        progress: see above.
        parts: see above.
        addresses: (S,) int64, of arrays of the values' type.
        lengths: (S,) int64, their lengths.
        offsets: (S + 1,) int64, the position where each begins.
        positions: (k,) int64.
        values: (k,) float32 or float64.
        factor: (1,) of the values' type.
        refused: (1,) int64, receives 1 when a position lies in no result; other entries may have been added then.
    """
    while True:
        part = fetch_add(progress, 0, 1)
        if part >= parts:
            break
        first, last = part * PART, min((part + 1) * PART, positions.size)
        if not _add_part(addresses, lengths, offsets, positions, values, factor[0], first, last):
            refused[0] = 1
        fetch_add(progress, 1, 1)
