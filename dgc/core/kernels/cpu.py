"""The CPU backend in Numba: the pass over a bucket (in ``sweep``), dense work, and work at selected positions.

A :class:`~dgc.core.kernels.threads.Team` runs the kernels. In a kernel's arguments, ``worker`` is the thread's number,
and ``progress``, (2,) int64, counts the pieces that were taken and those that are done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import carray, types
from typing_extensions import override

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import (
    PIECE,
    Array,
    Kernels,
    MomentumRule,
    SegmentWork,
    Selection,
    bounds_in_results,
    check_taken,
    check_work,
)
from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.simd import at_address, fetch_add, lowest_bit, prefetch_entry
from dgc.core.kernels.sweep import (
    FLOAT32,
    FLOAT64,
    STRIP,
    UNFINISHED,
    Workspace,
    address_of,
    begin,
    chosen,
    compress_chunks,
    make_table,
    place_of,
    prepare,
    select_whole,
    widen,
)
from dgc.core.kernels.threads import Team, default_threads
from dgc.errors import LayoutError

ALONE = 65536  # with fewer elements, waking other threads costs more than it saves

PLACE = 32  # one selected position takes as long as this many adjacent elements, because it misses the cache


class NumbaKernels(Kernels):
    """See :class:`dgc.core.kernels.base.Kernels`. Results do not depend on the number of threads.

    Attributes:
        threads: how many threads a call uses at most.
    """

    name = "numba"

    def __init__(self, threads: int | None = None) -> None:
        self._team = Team()
        self._workspace = Workspace()
        self.threads = max(1, threads if threads is not None else default_threads())

    @override
    def describe(self) -> str:
        return f"numba {numba.__version__}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @override
    def sums_of_squares(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        table = np.array([(*place_of(g, g.size, "gradient"), g.size) for g in gradients], np.int64).reshape(-1, 3)
        firsts = np.zeros(len(table) + 1, np.int64)
        np.cumsum(-(-table[:, 2] // TILE), out=firsts[1:])
        tiles = int(firsts[-1])
        threads = self._threads_for(tiles * TILE)
        strips, sums = np.empty((threads, STRIP), np.float32), np.empty((threads, SUM_LANES))
        partial = np.empty(tiles)
        self._team.run(threads, tile_sums, tiles, table, firsts, strips, sums, partial)
        with np.errstate(over="ignore"):
            return np.array([partial[first:stop].sum() for first, stop in itertools.pairwise(firsts)])

    @property
    @override
    def overlaps(self) -> bool:
        return self.threads > 1

    @override
    def begin_selection(
        self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, thresholds: np.ndarray | None
    ) -> Callable[[], Selection]:
        check_work(work, u, v, thresholds)
        integers, reals = make_table(work)
        segments, selecting = len(work), thresholds is not None
        if thresholds is None:
            thresholds = np.empty((segments, rules.COLUMNS))
        chunks, room, count, elements = prepare(integers, reals, thresholds, selecting)
        threads = self._threads_for(elements)
        scratch = self._workspace.borrow(threads, segments, chunks, room)
        positions, values = np.empty(count, np.int64), np.empty(count, np.float32)
        taken, nonfinite = np.zeros(segments, np.int64), np.zeros(threads, np.int64)
        begin(integers, scratch.chunks, scratch.left, scratch.spent)
        under_way = self._team.start(
            min(threads - 1, chunks),
            compress_chunks, chunks, integers, reals, thresholds, u, v, selecting, room, scratch.chunks, scratch.left,
            scratch.positions, scratch.values, scratch.spent, nonfinite, taken, positions, values, keeps=work,
        )  # fmt: skip

        def finish() -> Selection:
            under_way.finish()
            self._workspace.kept.append(scratch)
            if (which := np.flatnonzero(taken == UNFINISHED)).size:
                self._team.run(
                    threads, select_whole, which.size, v, integers, thresholds, which, positions, values, taken
                )
            return chosen(integers, taken, positions, values, bool(nonfinite.any()))

        return finish

    @override
    def take_out(self, u: Array, v: Array, positions: np.ndarray, decoded: np.ndarray, *, masking: bool) -> None:
        check_taken(positions, decoded, min(u.size, v.size))
        decoded, k = np.ascontiguousarray(decoded, v.dtype), positions.size
        self._team.run(self._threads_for(PLACE * k), mask_places, -(-k // PART), u, v, positions, decoded, masking)

    @override
    def set_entries(
        self, results: Sequence[Array], offsets: np.ndarray, positions: np.ndarray, values: np.ndarray
    ) -> None:
        for s, result in enumerate(results):
            if not result.flags.writeable:
                raise LayoutError(f"result {s} is read-only")
            if result.dtype != np.float32 or not result.flags.c_contiguous:
                raise LayoutError(f"result {s} is {result.dtype}; all must be contiguous float32")
        if values.shape != positions.shape:
            raise LayoutError(f"{values.size} values were given for {positions.size} positions")
        bounds = bounds_in_results(results, offsets, positions)
        table = np.array([(address_of(r), r.size) for r in results], np.int64).reshape(-1, 2)
        self._team.run(
            self._threads_for(int(offsets[-1])), fill_results, len(results), table, offsets, bounds, positions,
            np.ascontiguousarray(values, np.float32),
        )  # fmt: skip

    @override
    def dense_update(
        self, result: Array, mean: np.ndarray, u: Array, parameter: Array | None, rule: MomentumRule
    ) -> None:
        n = result.size
        if not result.dtype == mean.dtype == u.dtype or result.dtype not in (np.float32, np.float64):
            raise LayoutError(f"{result.dtype}, {mean.dtype} and {u.dtype}: all must be float32, or all float64")
        if mean.shape != (n,) or u.shape != (n,):
            raise LayoutError(f"a result of {n} elements was given a mean of {mean.size} and a momentum of {u.size}")
        if result.dtype == np.float64:
            ReferenceKernels().dense_update(result, mean, u, parameter, rule)
            return
        at, code, weight_decay = 0, 0, 0.0
        if parameter is not None and rule.weight_decay:
            weight_decay = float(rule.weight_decay)
            at, code = place_of(parameter, n, "parameter")
        threads = self._threads_for(n)
        self._team.run(
            threads, update_tiles, -(-n // TILE), result, mean, u, at, code, float(rule.momentum), bool(rule.nesterov),
            weight_decay, float(rule.scale), np.empty((threads, STRIP if weight_decay else 0), np.float32),
        )  # fmt: skip

    @override
    def is_elsewhere(self, p: Array, theta: Array, a: Array, shares: Array | None) -> Any:
        if len(p) < ALONE:
            return super().is_elsewhere(p, theta, a, shares)
        return bool(self._run_ahead(COMPARE, p, theta, a, shares).any())

    @override
    def take_update(
        self, p: Array, theta: Array, a: Array, shares: Array | None, factors: Array | None, decay: float
    ) -> None:
        if len(p) < ALONE:
            super().take_update(p, theta, a, shares, factors, decay)
        else:
            self._run_ahead(TAKE, p, theta, a, shares, factors, decay)

    @override
    def put(self, p: Array, theta: Array, a: Array, shares: Array | None) -> None:
        if len(p) < ALONE:
            super().put(p, theta, a, shares)
        else:
            self._run_ahead(PUT, p, theta, a, shares)

    def _run_ahead(
        self, task: int, p: Array, theta: Array, a: Array, shares: Array | None, factors: Array | None = None,
        decay: float = 0.0,
    ) -> np.ndarray:  # fmt: skip
        arrays = [np.asarray(each) for each in (p, theta, a)]  # of torch's tensors, without a copy
        n = len(p)
        if any(each.shape != (n,) or each.dtype != np.float32 for each in arrays):
            raise LayoutError(f"{', '.join(f'{e.dtype} {e.shape}' for e in arrays)}: all must be float32 of one length")
        found = np.zeros(self.threads, np.bool_)
        for each in (shares, factors):
            given = np.ones(1, np.float32) if each is None else np.asarray(each, np.float32)
            if given.size not in (1, -(-n // PIECE)):
                raise LayoutError(f"{given.size} factors for {n} elements")
            arrays.append(given)
        self._team.run(self.threads, ahead_tiles, -(-n // TILE), *arrays, task, np.float32(decay), found)
        return found

    def _threads_for(self, elements: int) -> int:
        return 1 if elements < ALONE else self.threads


# -- dense work: sums of squares for clipping, and momentum SGD on an averaged gradient --------------------------------

# Elements in one piece of an update, or in one partial sum. Fixed, so that sums do not depend on the number of threads.
TILE = 32768

# Interleaved sums within a tile. Fixed, so that sums do not depend on the width of the machine's vectors.
SUM_LANES = 64


@helper
def _squares(array, sums):
    """Return the sum of squares of the finite entries; ``sums`` is (SUM_LANES,) float64 scratch."""
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


@entry
def tile_sums(worker, progress, tiles, table, firsts, strips, sums, partial):
    """Write the sum of squares of each tile's finite entries. A kernel for ``Team``.

    ``table`` holds the arrays' addresses, types and lengths; array s has the tiles ``firsts[s]`` to ``firsts[s + 1]``.
    """
    s = len(table) - 1
    while True:
        # Go from the end to the beginning: the next pass starts at the beginning, which is then in the caches.
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


@entry
def update_tiles(worker, progress, tiles, result, mean, u, address, code, momentum, nesterov, decay, scale, strips):
    """Apply momentum SGD to (n,) ``mean``, strip by strip, so that a strip stays in the cache. A kernel for ``Team``.

    ``address`` and ``code`` describe the parameter, which is read only if ``decay`` is not 0. ``strips`` is (W, STRIP)
    scratch.
    """
    n = result.size
    m, d, c = np.float32(momentum), np.float32(decay), np.float32(scale)
    while True:
        tile = fetch_add(progress, 0, 1)
        if tile >= tiles:
            break
        last = min((tile + 1) * TILE, n)
        for start in range(tile * TILE, last, STRIP):
            count = min(STRIP, last - start)
            # Slices make indices start at 0. An index that might be negative would cost a branch in each loop.
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


# -- step-ahead error feedback -----------------------------------------------------------------------------------------

COMPARE, TAKE, PUT = range(3)


@entry
def ahead_tiles(worker, progress, tiles, p, theta, a, shares, factors, task, decay, found):
    """Compare p with the place theta + share * a, take the update out of p, or write the place into p; (n,) each.

    A kernel for ``Team``. ``found[worker]`` becomes True if p differs somewhere. Shares and factors have an element for
    each piece, or one for all.
    """
    while True:
        tile = fetch_add(progress, 0, 1)
        if tile >= tiles:
            break
        stop = min((tile + 1) * TILE, p.size)
        for at in range(tile * TILE, stop, PIECE):  # slices of their own, so that the compiler vectorises the loops
            end, piece = min(at + PIECE, stop), at // PIECE
            share, s = shares[min(piece, shares.size - 1)], factors[min(piece, factors.size - 1)]
            x, t, y = p[at:end], theta[at:end], a[at:end]
            if task == COMPARE:
                differs = False
                for i in range(x.size):
                    differs |= x[i] != t[i] + y[i] * share
                found[worker] |= differs
            elif task == PUT:
                for i in range(x.size):
                    x[i] = t[i] + y[i] * share
            elif s == 1 or decay == 0:
                for i in range(x.size):
                    x[i] = s * (x[i] - (t[i] + y[i] * share))
            else:
                kept = (s - np.float32(1)) * decay
                for i in range(x.size):
                    x[i] = s * (x[i] - (t[i] + y[i] * share)) + t[i] * kept
        fetch_add(progress, 1, 1)


# -- work at k selected positions, which are ascending and unique, so that no two threads write the same element -------

PART = 4096  # a thread takes this many entries at a time

# Elements of u and v are prefetched this many entries in advance.
SOON = 16


@entry
def mask_places(worker, progress, parts, u, v, positions, decoded, masking):
    """Subtract ``decoded`` from v at the positions and, with masking, set u to 0 there. A kernel for ``Team``."""
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


@entry
def fill_results(worker, progress, count, table, offsets, bounds, positions, values):
    """Set ``count`` results to the values at their positions, and to 0 elsewhere. A kernel for ``Team``.

    ``table`` holds addresses and lengths. Result s begins at position ``offsets[s]``, its entries at ``bounds[s]``.
    """
    while True:
        s = fetch_add(progress, 0, 1)
        if s >= count:
            break
        result = carray(at_address(table[s, 0]), (table[s, 1],), types.float32)
        result[:] = 0
        for i in range(bounds[s], bounds[s + 1]):
            result[positions[i] - offsets[s]] = values[i]
        fetch_add(progress, 1, 1)


# -- the sum of all ranks' entries, for every backend, because messages arrive on the host -----------------------------

BLOCK = 1 << 15  # this many positions are added up at a time: their sums stay in the cache
WORD = 64  # positions that one integer marks as present


def add_up(entries: Sequence[tuple[np.ndarray, np.ndarray]], factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Add up the ranks' entries: at each position ``((0 + a * factor) + b * factor) + ...``, in the order given.

    Args:
        entries: for each rank, (k,) int64 positions, ascending and unique, and (k,) float32 values.
        factor: rounded to float32 before it is used.

    Returns:
        (n,) int64, the positions that occur on any rank, ascending and unique; and (n,) float32 sums.
    """
    runs, numbers = zip(*entries, strict=True)
    bounds = np.cumsum([0, *map(len, runs)], dtype=np.int64)
    positions, values = np.concatenate(runs), np.concatenate(numbers)
    out, sums = np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.float32)
    here, present = np.zeros(BLOCK, np.float32), np.zeros(BLOCK // WORD, np.uint64)
    count = _add_up(positions, values, bounds, np.float32(factor), here, present, out, sums)
    return out[:count], sums[:count]


@entry
def _add_up(positions, values, bounds, factor, here, present, out, sums):
    ranks = len(bounds) - 1
    at = bounds[:-1].copy()
    count, last = 0, np.int64(-1)
    for r in range(ranks):
        if bounds[r + 1] > bounds[r]:
            last = max(last, positions[bounds[r + 1] - 1])
    start = np.int64(0)
    while start <= last:
        stop = start + BLOCK
        following = last + 1
        for r in range(ranks):
            i, end = at[r], bounds[r + 1]
            while i < end and positions[i] < stop:
                place = positions[i] - start
                here[place] += values[i] * factor
                present[place // WORD] |= np.uint64(1) << np.uint64(place % WORD)
                i += 1
            at[r] = i
            if i < end:
                following = min(following, positions[i])
        for w in range(len(present)):
            word = present[w]
            if word == 0:
                continue
            present[w] = 0
            while word:
                place = w * WORD + lowest_bit(word)
                word &= word - np.uint64(1)
                out[count] = start + place
                sums[count] = here[place]
                here[place] = 0
                count += 1
        start = max(stop, following)
    return count
