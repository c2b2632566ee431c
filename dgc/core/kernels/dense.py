"""Dense work: sums of squares for clipping, and momentum SGD on an averaged gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import carray, types

from dgc.core.kernels.jit import entry, helper
from dgc.core.kernels.sweep import STRIP, infinity_key, magnitude_mask, widen
from dgc.core.kernels.table import FLOAT32, FLOAT64
from dgc.core.kernels.vector import (
    AHEAD,
    LANES,
    add_squares,
    at_address,
    bits_of,
    fetch_add,
    finite_part,
    load,
    prefetch,
    store,
    threshold,
)

TILE = 32768
"""Elements that a thread takes at a time, and those of one partial sum: fixed, so that a sum does not depend on the
number of threads."""

SUM_LANES = 64
"""Interleaved sums within a tile; fixed, so that a sum does not depend on the width of the machine's vectors."""


def _make_squares(checked: bool) -> Callable[..., None]:
    """Build the loop that leaves out entries that are not finite, or the one that trusts that there are none."""

    @helper
    def squares(array, start, stop, sums):
        """Add the squares of ``array[start:stop]`` to ``sums``, (SUM_LANES,) float64: entry i to sum i % SUM_LANES."""
        mask, infinity = magnitude_mask(array.itemsize), infinity_key(array.itemsize)
        bits = bits_of(array)
        limit = threshold(array, infinity)
        for lane in range(0, SUM_LANES, LANES):
            total = load(sums, lane)
            i = start + lane
            while i - lane + SUM_LANES <= stop:
                prefetch(array, i + AHEAD)
                x = load(array, i)
                total = add_squares(total, finite_part(x, limit) if checked else x)
                i += SUM_LANES
            store(sums, lane, total)
        rest = start + (stop - start) // SUM_LANES * SUM_LANES
        for j in range(rest, stop):
            if bits[j] & mask < infinity:
                x = np.float64(array[j])
                sums[j - rest] += x * x

    return squares


_squares_trusting = _make_squares(False)
_squares_checked = _make_squares(True)


@helper
def _squares(array, start, stop, sums):
    """The sum of squares of the finite entries; one that is not finite shows in the sum, and is rare."""
    for checked in range(2):
        sums[:] = 0
        if checked:
            _squares_checked(array, start, stop, sums)
        else:
            _squares_trusting(array, start, stop, sums)
        total = 0.0
        for lane in range(SUM_LANES):
            total += sums[lane]
        if total < np.inf:
            break
    return total


@helper
def _squares_of_tile(address, code, start, stop, strip, sums):
    if code == FLOAT32:
        return _squares(carray(at_address(address), (stop,), types.float32), start, stop, sums)
    if code == FLOAT64:
        return _squares(carray(at_address(address), (stop,), types.float64), start, stop, sums)
    total = 0.0
    for low in range(start, stop, STRIP):
        count = min(STRIP, stop - low)
        widen(address, code, low, count, strip)
        total += _squares(strip, 0, count, sums)
    return total


@entry()
def tile_sums(worker, progress, count, addresses, codes, lengths, tiles, strips, sums, partial):
    """Sum of squares over the finite entries of each tile. A kernel for ``Team``, W threads.

    Args:
        worker: this thread's number, below W.
        progress: (2,) int64: tiles taken, tiles done.
        count: number of tiles.
        addresses: (S,) int64.
        codes: (S,) int64 element types.
        lengths: (S,) int64.
        tiles: (S + 1,) int64: array s has the tiles ``tiles[s]`` to ``tiles[s + 1]``, each TILE elements but the last.
        strips: (W, STRIP) float32 scratch.
        sums: (W, SUM_LANES) float64 scratch.
        partial: (count,) float64, filled.
    """
    s = 0
    while True:
        tile = fetch_add(progress, 0, 1)
        if tile >= count:
            break
        while tile >= tiles[s + 1]:
            s += 1
        start = (tile - tiles[s]) * TILE
        stop = min(start + TILE, lengths[s])
        partial[tile] = _squares_of_tile(addresses[s], codes[s], start, stop, strips[worker], sums[worker])
        fetch_add(progress, 1, 1)


@entry()
def add_tiles(tiles, partial, out):
    """``out[s]`` = the sum of tiles ``tiles[s]`` to ``tiles[s + 1]``, in order."""
    for s in range(out.size):
        total = 0.0
        for tile in range(tiles[s], tiles[s + 1]):
            total += partial[tile]
        out[s] = total


@entry()
def update(worker, progress, tiles, result, mean, u, address, code, momentum, nesterov, decay, scale, strips):
    """Momentum SGD on ``mean``, strip by strip, so that the steps of one strip meet in the cache. For ``Team``.

    Args:
        worker: this thread's number, below W.
        progress: (2,) int64: tiles taken, tiles done.
        tiles: number of tiles of TILE elements.
        result: (n,) float32 or float64, written.
        mean: (n,) of that type.
        u: (n,) of that type, in place when there is momentum.
        address: of the parameter, when there is weight decay.
        code: its element type.
        momentum: rounded to the type, as are ``decay`` and ``scale``.
        nesterov: bool.
        decay: 0 for none.
        scale: of the result.
        strips: (W, STRIP) of the type, scratch; not used without weight decay.
    """
    n = result.size
    kind = result.dtype.type
    m, d, c = kind(momentum), kind(decay), kind(scale)
    while True:
        tile = fetch_add(progress, 0, 1)
        if tile >= tiles:
            break
        last = min((tile + 1) * TILE, n)
        for start in range(tile * TILE, last, STRIP):
            count = min(STRIP, last - start)
            # Slices, so that indices start at 0: one that might be negative would be a branch in each loop.
            r, g, w = result[start : start + count], mean[start : start + count], u[start : start + count]
            if decay != 0:
                p = strips[worker]
                widen(address, code, start, count, p)
                for i in range(count):
                    r[i] = g[i] + p[i] * d
            else:
                for i in range(count):
                    r[i] = g[i]
            if momentum != 0:
                for i in range(count):
                    w[i] = w[i] * m + r[i]
                if nesterov:
                    for i in range(count):
                        r[i] += m * w[i]
                else:
                    for i in range(count):
                        r[i] = w[i]
            if scale != 1:
                for i in range(count):
                    r[i] *= c
        fetch_add(progress, 1, 1)
