"""The CPU backend in Numba: one pass over memory for all segments of a bucket; see ``accumulate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba
import numpy as np

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import Array, Kernels, MomentumRule, SegmentWork, Selection, check_positions
from dgc.core.kernels.cpu import scatter
from dgc.core.kernels.cpu.accumulate import STRIP
from dgc.core.kernels.cpu.dense import SUM_LANES, TILE, add_tiles, tile_sums, update
from dgc.core.kernels.cpu.select_candidates import (
    UNFINISHED,
    Workspace,
    begin,
    compress_chunks,
    outcome,
    prepare,
    without_gaps,
)
from dgc.core.kernels.cpu.select_radix import select_whole
from dgc.core.kernels.cpu.threads import Team, default_threads
from dgc.core.kernels.cpu.work_table import address_of, make_table, place_of
from dgc.errors import LayoutError

ALONE = 65536
"""Elements below which waking other threads costs more than it saves."""

PLACE = 32
"""A selected place takes as long as this many elements in a row: it misses the cache."""

MOST_ELEMENTS = 2**31
"""Candidates' positions are int32."""


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
        n = 4 * ALONE
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
        table = np.array([(*place_of(g, g.size, "gradient"), g.size) for g in gradients], np.int64).reshape(-1, 3)
        firsts = np.zeros(len(table) + 1, np.int64)
        np.cumsum(-(-table[:, 2] // TILE), out=firsts[1:])
        tiles = int(firsts[-1])
        threads = self._threads_for(tiles * TILE)
        strips, sums = np.empty((threads, STRIP), np.float32), np.empty((threads, SUM_LANES))
        partial, out = np.empty(tiles), np.empty(len(table))
        self._team.run(threads, tile_sums, tiles, table, firsts, strips, sums, partial)
        add_tiles(firsts, partial, out)
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
        check_positions(positions, min(u.size, v.size))
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
            compress_chunks, chunks, integers, reals, thresholds, u, v, selecting, room, scratch.chunks, scratch.left,
            scratch.positions, scratch.values, scratch.spent, nonfinite, taken, positions, values, keeps=work,
        )  # fmt: skip

        def finish() -> Selection:
            under_way.finish()
            self._workspace.give_back(kind, scratch)
            unfinished, total, met = outcome(taken, nonfinite)
            if unfinished:
                which = np.flatnonzero(taken == UNFINISHED)
                self._team.run(
                    threads, select_whole, which.size, v, integers, thresholds, which, positions, values, taken
                )
                total = int(taken.sum())
            if total < count:
                given, picked = without_gaps(integers, taken, positions, values)
                return Selection(given, met, picked)
            return Selection(positions, met, values)

        return finish


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
