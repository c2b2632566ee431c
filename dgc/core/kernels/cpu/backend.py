"""The CPU backend in Numba: one pass over memory for all segments of a bucket; see ``accumulate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba
import numpy as np

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import Array, Kernels, MomentumRule, SegmentWork, Selection
from dgc.core.kernels.cpu import scatter, select_radix
from dgc.core.kernels.cpu.accumulate import STRIP
from dgc.core.kernels.cpu.dense import GROUP, SUM_LANES, TILE, add_tiles, share_out, tile_sums, update
from dgc.core.kernels.cpu.select_candidates import BINS, UNFINISHED, Workspace, begin, compress_chunks, outcome, prepare
from dgc.core.kernels.cpu.select_radix import COUNT, TALLY_ALL, TALLY_RANGE, WRITE
from dgc.core.kernels.cpu.simd import bits_of
from dgc.core.kernels.cpu.threads import Team, default_threads
from dgc.core.kernels.cpu.work_table import ENTRIES, LENGTH, OFFSET, OUT, address_of, make_table, place_of
from dgc.errors import LayoutError

ALONE = 65536
"""Elements below which waking other threads costs more than it saves."""

PLACE = 32
"""A selected place takes as long as this many elements in a row: it misses the cache."""

LARGE = 262144
"""Segments from this length on are selected with all threads at once, shorter ones each by one thread."""

MOST_ELEMENTS = 2**31
"""Candidates' positions are int32."""

LARGEST_PARTS = 64
"""Pieces that the selection of a large segment is shared out in; each has a histogram of its own."""


class NumbaKernels(Kernels):
    """The operations of size n on CPU arrays; see :class:`dgc.core.kernels.base.Kernels`.

    Safe to call from several Python threads, each with buckets of its own. u, v and all results must be contiguous;
    what comes out does not depend on the number of threads.
    """

    name = "numba"

    def __init__(self, threads: int | None = None, *, local_size: int | None = None) -> None:
        """Choose the number of threads.

        Args:
            threads: threads per call; None takes the process's share of the host's cores.
            local_size: ranks on this host, when ``threads`` is None; None asks the launcher's environment.

        Raises:
            ConfigError: DGC_NUM_THREADS is set to something else than a number.
        """
        self._team = Team()
        self._workspace = Workspace()
        self._threads = 1
        self.set_threads(threads if threads is not None else default_threads(local_size))

    @property
    def threads(self) -> int:
        """Threads per call."""
        return self._threads

    def set_threads(self, threads: int) -> None:
        """Use up to ``threads`` threads per call from now on, at least 1."""
        self._threads = max(1, threads)

    def describe(self) -> str:
        """One line for a log: what runs, and on how many threads."""
        return f"numba {numba.__version__}, {self._threads} thread{'s' if self._threads > 1 else ''}"

    def warm_up(self, dtype: str = "float32") -> None:
        """Compile every kernel for buckets of ``dtype``, or load it from the cache, so that no step waits for it."""
        kind = np.dtype(dtype)
        n = LARGE
        g = np.ones(n, kind)
        u, v = np.zeros(n, kind), np.zeros(n, kind)
        thresholds = self.new_thresholds(2)
        work = [SegmentWork(g[: n // 4], None, 0, n // 4, 4)]
        self.accumulate(work, u, v)
        self.accumulate_and_select([SegmentWork(g, None, 0, n, 4)], u, v, thresholds[:1])
        few = self.accumulate_and_select(work, u, v, thresholds[1:]).positions
        many = np.arange(0, n, 2)
        for positions in (few, many):
            sent = v[positions]
            self.mask(u, v, positions, sent, masking=True)
            self.scatter_add([g.copy()], np.array([0, n]), positions, sent, 1.0)
        for size in (4, n):
            self.sums_of_squares([g[:size]])
            self.dense_update(u[:size].copy(), g[:size], v[:size], None, MomentumRule(momentum=0.9))

    def sums_of_squares(self, gradients: Sequence[np.ndarray]) -> np.ndarray:  # noqa: D102
        rows = [(*place_of(g, g.size, "gradient"), g.size) for g in gradients]
        table = np.array(rows, np.int64).reshape(-1, 3)
        out, shares = np.empty(len(rows)), np.empty((2, len(rows) + 1), np.int64)
        tiles, groups = share_out(table, shares)
        threads = self._threads_for(tiles * TILE)
        strips, sums = np.empty((threads, STRIP), np.float32), np.empty((threads, GROUP, SUM_LANES))
        partial = np.empty(tiles)
        self._team.run(threads, tile_sums, groups, table, shares, strips, sums, partial)
        add_tiles(shares[0], partial, out)
        return out

    def accumulate(self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray) -> bool:  # noqa: D102
        return self._begin(work, u, v, None)().nonfinite

    def accumulate_and_select(  # noqa: D102
        self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, thresholds: np.ndarray
    ) -> Selection:
        return self._begin(work, u, v, thresholds)()

    @property
    def overlaps(self) -> bool:  # noqa: D102
        return self._threads > 1

    def begin_selection(  # noqa: D102
        self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, thresholds: np.ndarray
    ) -> Callable[[], Selection]:
        return self._begin(work, u, v, thresholds, at_once=False)

    def mask(self, u: Array, v: Array, positions: np.ndarray, decoded: np.ndarray, *, masking: bool) -> None:  # noqa: D102
        _check_positions(positions, min(u.size, v.size))
        decoded = np.ascontiguousarray(decoded, v.dtype)
        if decoded.shape != positions.shape:
            raise LayoutError(f"{decoded.size} decoded values were given for {positions.size} positions")
        self._run_places(scatter.mask, positions.size, u, v, positions, decoded, masking)

    def scatter_add(  # noqa: D102
        self, results: Sequence[Array], offsets: np.ndarray, positions: np.ndarray, values: np.ndarray, factor: float
    ) -> None:
        if positions.size == 0:
            return
        if not results:
            raise LayoutError(f"{positions.size} positions were given, and no result to add to")
        kind = results[0].dtype
        for s, result in enumerate(results):
            if not result.flags.writeable:
                raise LayoutError(f"result {s} is read-only")
            if result.dtype != kind or kind not in (np.float32, np.float64) or not result.flags.c_contiguous:
                raise LayoutError(f"result {s} is {result.dtype}; all must be contiguous float32, or all float64")
        if values.shape != positions.shape:
            raise LayoutError(f"{values.size} values were given for {positions.size} positions")
        addresses = np.array([address_of(r) for r in results], np.int64)
        lengths = np.minimum(np.array([r.size for r in results], np.int64), np.diff(offsets))
        refused = np.zeros(1, np.int64)
        self._run_places(
            scatter.scatter_add, positions.size, addresses, lengths, offsets, positions,
            np.ascontiguousarray(values, kind), np.array([factor], kind), refused,
        )  # fmt: skip
        if refused[0]:
            raise LayoutError("a position lies in the padding between tensors; nothing is ever selected there")

    def dense_update(  # noqa: D102
        self, result: Array, mean: np.ndarray, u: Array, parameter: Array | None, rule: MomentumRule
    ) -> None:
        n = result.size
        if not result.dtype == mean.dtype == u.dtype or result.dtype not in (np.float32, np.float64):
            raise LayoutError(f"{result.dtype}, {mean.dtype} and {u.dtype}: all must be float32, or all float64")
        if mean.shape != (n,) or u.shape != (n,):
            raise LayoutError(f"a result of {n} elements was given a mean of {mean.size} and a momentum of {u.size}")
        at, code, weight_decay = 0, 0, 0.0
        if parameter is not None and rule.weight_decay:
            weight_decay = float(rule.weight_decay)
            at, code = place_of(parameter, n, "parameter")
        threads = self._threads_for(n)
        self._team.run(
            threads, update, -(-n // TILE), result, mean, u, at, code, float(rule.momentum), bool(rule.nesterov),
            weight_decay, float(rule.scale), np.empty((threads, STRIP if weight_decay else 0), result.dtype),
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------------------------

    def _threads_for(self, elements: int) -> int:
        return 1 if elements < ALONE else self._threads

    def _run_places(self, kernel: Callable[..., None], k: int, *arguments: object) -> None:
        self._team.run(self._threads_for(PLACE * k), kernel, -(-k // scatter.PART), *arguments)

    def _begin(
        self,
        work: Sequence[SegmentWork],
        u: np.ndarray,
        v: np.ndarray,
        thresholds: np.ndarray | None,
        *,
        at_once: bool = True,
    ) -> Callable[[], Selection]:
        """Let other threads begin with a pass; what comes back goes on with it, to be called exactly once.

        ``at_once``: it is called right away, so that there is no use in waking a thread for the only chunk.
        """
        kind = _check_state(u, v)
        integers, reals = make_table(work, v.size)
        segments, selecting = len(work), thresholds is not None
        if thresholds is None:
            thresholds = np.empty((segments, rules.COLUMNS))
        elif thresholds.shape != (segments, rules.COLUMNS) or not thresholds.flags.c_contiguous:
            raise LayoutError(
                f"thresholds have shape {thresholds.shape}; expected ({segments}, {rules.COLUMNS}), contiguous"
            )
        chunks, room, count, elements = prepare(integers, reals, thresholds, selecting, np.empty(1, kind))
        threads = self._threads_for(elements)
        scratch = self._workspace.borrow(kind, threads, segments, chunks, room)
        positions, values = np.empty(count, np.int64), np.empty(count, kind)
        taken, nonfinite = np.empty(segments, np.int64), np.empty(threads, np.int64)
        begin(integers, scratch.chunks, scratch.left, scratch.spent, nonfinite, taken)
        under_way = self._team.start(
            min(threads, chunks) - 1 if at_once else min(threads - 1, chunks),
            compress_chunks, chunks, integers, reals, thresholds, u, v, selecting, room, scratch.chunks,
            scratch.left, scratch.positions, scratch.values, scratch.spent, scratch.wide, scratch.bins, scratch.likes,
            nonfinite, taken, positions, values, keeps=work,
        )  # fmt: skip

        def finish() -> Selection:
            under_way.finish()
            self._workspace.give_back(kind, scratch)
            unfinished, total, met = outcome(taken, nonfinite)
            if unfinished:
                self._select_by_histogram(integers, thresholds, v, positions, values, taken)
                total = int(taken.sum())
            if total < count:
                given, picked = _without_gaps(integers, taken, positions, values)
                return Selection(given, met, picked)
            return Selection(positions, met, values)

        return finish

    def _select_by_histogram(
        self,
        integers: np.ndarray,
        thresholds: np.ndarray,
        v: np.ndarray,
        positions: np.ndarray,
        values: np.ndarray,
        taken: np.ndarray,
    ) -> None:
        """Select the segments that are UNFINISHED, large ones with all threads at once, small ones side by side."""
        unfinished = np.flatnonzero(taken == UNFINISHED)
        lengths = integers[unfinished, LENGTH]
        bits, found = bits_of(v), np.zeros((len(integers), 3), np.int64)
        small = unfinished[lengths < LARGE]
        threads = max(1, min(self._threads_for(int(lengths.sum())), small.size))
        likes = np.empty((threads, 1), v.dtype)
        if small.size:
            bins = np.empty((threads, 2, BINS), np.int64)
            self._team.run(
                threads, select_radix.select_each, small.size, v, bits, integers, small, bins, likes, positions, values,
                found,
            )  # fmt: skip
        for s in unfinished[lengths >= LARGE]:
            found[s] = self._select_large(integers[s], v, bits, likes[0], positions, values)
        taken[unfinished] = found[unfinished, 0]
        magnitudes = found[:, 1].astype(bits.dtype).view(v.dtype)
        for s in unfinished:
            kth = float(magnitudes[s])
            rules.learn(thresholds[s], int(integers[s, ENTRIES]), rules.WIDER * kth, int(found[s, 2]), kth)

    def _select_large(
        self,
        row: np.ndarray,
        v: np.ndarray,
        bits: np.ndarray,
        like: np.ndarray,
        positions: np.ndarray,
        values: np.ndarray,
    ) -> tuple[int, int, int]:
        """Select one segment; returns what :func:`dgc.core.kernels.cpu.select_radix.select_each` does."""
        offset, length, k, place = (int(row[column]) for column in (OFFSET, LENGTH, ENTRIES, OUT))
        parts = min(LARGEST_PARTS, length // LARGE * 2)
        bins, tallies = np.empty((parts, 2, BINS), np.int64), np.empty((parts, 2), np.int64)

        def sweep(task: int, low: int, high: int = 0, shift: int = 0, ties: int = 0) -> int:
            self._team.run(
                self._threads, select_radix.sweep_parts, parts, task, v, bits, offset, length, low, high, shift, bins,
                tallies, ties, positions, values, place,
            )  # fmt: skip
            return int(tallies[:, 0].sum())

        nonzero = sweep(COUNT, 1)
        if nonzero <= k:
            sweep(WRITE, 0)
            return nonzero, 0, 0
        low, high, shift = 0, np.iinfo(bits.dtype).max, select_radix.first_shift(v.itemsize)
        sweep(TALLY_ALL, low, high, shift)
        low, high, ties, shift = select_radix.descend(bins, low, high, shift, k)
        while low < high:
            sweep(TALLY_RANGE, low, high, shift)
            low, high, ties, shift = select_radix.descend(bins, low, high, shift, ties)
        sweep(COUNT, low)
        sweep(WRITE, low, ties=ties)
        return k, low, sweep(COUNT, select_radix.wider_key(low, like))


def _check_state(u: np.ndarray, v: np.ndarray) -> np.dtype:
    kind = v.dtype
    if kind not in (np.float32, np.float64) or u.dtype != kind:
        raise LayoutError(f"u is {u.dtype} and v is {kind}; both must be float32, or both float64")
    if u.ndim != 1 or v.ndim != 1 or not u.flags.c_contiguous or not v.flags.c_contiguous or u.size < v.size:
        raise LayoutError("u and v must be contiguous and 1-D, u not shorter than v")
    if v.size >= MOST_ELEMENTS:
        raise LayoutError(
            f"v has {v.size} elements; a bucket must have fewer than 2**31: choose a smaller bucket_bytes"
        )
    return kind


def _check_positions(positions: np.ndarray, size: int) -> None:
    """Positions are ascending, so that the ends tell whether all are inside."""
    if positions.size and not (0 <= positions[0] and positions[-1] < size):
        raise LayoutError(f"positions {positions[0]} to {positions[-1]} do not lie within {size} elements")


def _without_gaps(
    integers: np.ndarray, taken: np.ndarray, positions: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    inside = [slice(out, out + n) for out, n in zip(integers[:, OUT], taken, strict=True)]
    return np.concatenate([positions[i] for i in inside]), np.concatenate([values[i] for i in inside])
