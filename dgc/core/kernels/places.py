"""Work at the k selected places: gather, mask, put back, and the sum of messages into results.

k entries; positions are ascending and unique, so threads that take disjoint parts of them never meet.
"""

from __future__ import annotations

import numpy as np
from numba import carray, prange

from dgc.core.kernels.jit import entry, helper
from dgc.core.kernels.vector import at_address


def _gather(parts, array, positions, out):
    """``out = array[positions]``."""
    k = positions.size
    for turn in prange(parts):
        part = np.int64(turn)
        for i in range(k * part // parts, k * (part + 1) // parts):
            out[i] = array[positions[i]]


def _mask(parts, u, v, positions, decoded, masking, kept_u, kept_v):
    """``v[positions] -= decoded``, and ``u[positions] = 0`` with masking; the former state goes to kept_u, kept_v."""
    k = positions.size
    for turn in prange(parts):
        part = np.int64(turn)
        for i in range(k * part // parts, k * (part + 1) // parts):
            p = positions[i]
            old = v[p]
            kept_v[i] = old
            v[p] = old - decoded[i]
            kept_u[i] = u[p]
            if masking:
                u[p] = 0


def _restore(parts, u, v, positions, kept_u, kept_v):
    """``u[positions] = kept_u; v[positions] = kept_v``."""
    k = positions.size
    for turn in prange(parts):
        part = np.int64(turn)
        for i in range(k * part // parts, k * (part + 1) // parts):
            p = positions[i]
            u[p] = kept_u[i]
            v[p] = kept_v[i]


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


def _scatter_add(parts, addresses, lengths, offsets, positions, values, factor, done):
    """Add ``values * factor`` at ``positions`` to S results.

    Args:
        parts: number of threads.
        addresses: (S,) int64, of arrays of the values' type.
        lengths: (S,) int64, their lengths.
        offsets: (S + 1,) int64, the position where each begins.
        positions: (k,) int64.
        values: (k,) float32 or float64.
        factor: (1,) of the values' type.
        done: (parts,) bool, receives False where a position lies in no result; what came before it was added.
    """
    k = positions.size
    for turn in prange(parts):
        part = np.int64(turn)
        done[part] = _add_part(
            addresses, lengths, offsets, positions, values, factor[0], k * part // parts, k * (part + 1) // parts
        )


gather_alone = entry()(_gather)
gather_together = entry(parallel=True)(_gather)
mask_alone = entry()(_mask)
mask_together = entry(parallel=True)(_mask)
restore_alone = entry()(_restore)
restore_together = entry(parallel=True)(_restore)
scatter_add_alone = entry()(_scatter_add)
scatter_add_together = entry(parallel=True)(_scatter_add)
