"""Dense work: sums of squares for clipping, and momentum SGD on an averaged gradient."""

from __future__ import annotations

import numpy as np
from numba import carray, types

from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.cpu.accumulate import STRIP, widen
from dgc.core.kernels.cpu.simd import at_address, fetch_add
from dgc.core.kernels.cpu.work_table import FLOAT32, FLOAT64

TILE = 32768
"""Elements of an update's piece, and of one partial sum: fixed, so that sums do not depend on the number of threads."""

SUM_LANES = 64
"""Interleaved sums within a tile; fixed, so that a sum does not depend on the width of the machine's vectors."""


@helper
def _squares(array, sums):
    """The sum of squares of the finite entries; entry i joins sum i % SUM_LANES of the float64 scratch ``sums``."""
    sums[:] = 0
    for start in range(0, array.size, SUM_LANES):
        block = array[start : start + SUM_LANES]
        for lane in range(block.size):
            x = np.float64(block[lane])
            sums[lane] += x * x if abs(x) < np.inf else 0.0
    total = 0.0
    for lane in range(SUM_LANES):
        total += sums[lane]
    return total


@helper
def _squares_of_tile(address, code, start, stop, strip, sums):
    if code == FLOAT32:
        return _squares(carray(at_address(address), (stop,), types.float32)[start:], sums)
    if code == FLOAT64:
        return _squares(carray(at_address(address), (stop,), types.float64)[start:], sums)
    total = 0.0
    for low in range(start, stop, STRIP):
        count = min(STRIP, stop - low)
        widen(address, code, low, count, strip)
        total += _squares(strip[:count], sums)
    return total


@entry()
def tile_sums(worker, progress, tiles, table, firsts, strips, sums, partial):
    """Sum of squares over the finite entries of each tile. A kernel for ``Team``, W threads.

    Args:
        worker: this thread's number, below W.
        progress: (2,) int64: tiles taken, tiles done.
        tiles: number of tiles.
        table: (S, 3) int64: each array's address, element type and length.
        firsts: (S + 1,) int64: array s has the tiles ``firsts[s]`` to ``firsts[s + 1]``, each TILE elements but the
            last.
        strips: (W, STRIP) float32 scratch.
        sums: (W, SUM_LANES) float64 scratch.
        partial: (tiles,) float64, filled.
    """
    s = len(table) - 1
    while True:
        # From the end to the beginning, where the pass over the same gradients starts: it finds those in the caches.
        tile = tiles - 1 - fetch_add(progress, 0, 1)
        if tile < 0:
            break
        while tile < firsts[s]:
            s -= 1
        address, code, length = table[s]
        start = (tile - firsts[s]) * TILE
        stop = min(start + TILE, length)
        partial[tile] = _squares_of_tile(address, code, start, stop, strips[worker], sums[worker])
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
