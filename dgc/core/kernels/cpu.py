"""The CPU backend in Numba: one pass over memory for all segments of a bucket; see ``candidates`` and ``sweep``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

from dgc.core.errors import LayoutError
from dgc.core.kernels import control as rules
from dgc.core.kernels.base import Kept, SegmentWork, Selection
from dgc.core.kernels.candidates import UNFINISHED, pass_alone, pass_together, prepare
from dgc.core.kernels.dense import (
    SUM_LANES,
    TILE,
    sums_of_squares_alone,
    sums_of_squares_together,
    update_alone,
    update_together,
)
from dgc.core.kernels.histogram import large_alone, large_together, small_alone, small_together
from dgc.core.kernels.pick import BINS
from dgc.core.kernels.places import (
    gather_alone,
    gather_together,
    mask_alone,
    mask_together,
    restore_alone,
    restore_together,
    scatter_add_alone,
    scatter_add_together,
)
from dgc.core.kernels.sweep import STRIP
from dgc.core.kernels.table import ENTRIES, LENGTH, OFFSET, OUT, address_of, element_code, make_table
from dgc.core.kernels.threads import default_threads, threading_layer
from dgc.core.kernels.vector import bits_of

logger = logging.getLogger(__name__)

ALONE = 65536
"""Elements below which waking other threads costs more than it saves."""

PLACE = 32
"""A selected place takes as long as this many elements in a row: it misses the cache."""

LARGE = 262144
"""Segments from this length on are selected with all threads at once, shorter ones each by one thread."""


class _Scratch:
    """Scratch arrays of the pass over a bucket, of at least the sizes asked for."""

    def __init__(self, kind: np.dtype, workers: int, segments: int, chunks: int, room: int) -> None:
        self.sizes = (workers, segments, chunks, workers * room)
        self.chunks = np.empty((3, chunks), np.int64)
        self.left = np.empty(segments, np.int64)
        self.spent = np.empty((workers, segments), np.int64)
        self.positions = np.empty(workers * room, np.int32)
        self.values = np.empty(workers * room, kind)
        self.wide = np.empty((workers, 2 * STRIP), kind)
        self.bins = np.empty((workers, 2, BINS), np.int64)
        self.likes = np.empty((workers, 1), kind)
        self.tickets = np.empty(1, np.int64)


class _Workspace(threading.local):
    """What a Python thread keeps from call to call: it grows, and stays."""

    def __init__(self) -> None:
        self._scratch: dict[np.dtype, _Scratch] = {}

    def scratch(self, kind: np.dtype, workers: int, segments: int, chunks: int, room: int) -> _Scratch:
        """Return the scratch arrays for buckets of type ``kind``, grown when they are too small."""
        scratch = self._scratch.get(kind)
        if scratch is not None:
            w, s, c, r = scratch.sizes
            if workers <= w and segments <= s and chunks <= c and workers * room <= r:
                return scratch
            workers, segments, chunks = max(workers, w), max(segments, s), max(chunks, c)
            room = max(room, -(-r // workers))
        scratch = self._scratch[kind] = _Scratch(kind, workers, segments, chunks, room)
        return scratch


class NumbaKernels:
    """The operations of size n on CPU arrays; see :class:`dgc.core.kernels.base.Kernels`.

    Safe to call from several Python threads, each with buckets of its own. u, v and all results must be contiguous;
    results do not depend on the number of threads.
    """

    name = "numba"

    def __init__(self, threads: int | None = None, *, local_size: int | None = None) -> None:
        """Choose the threading.

        Args:
            threads: threads per call; None takes the process's share of the host's cores.
            local_size: ranks on this host, when ``threads`` is None; None asks the launcher's environment.

        Raises:
            ConfigError: DGC_NUM_THREADS is set to something else than a number.
        """
        self._layer = threading_layer()
        self._threads = 1
        self._workspace = _Workspace()
        self.set_threads(threads if threads is not None else default_threads(local_size))

    @property
    def threads(self) -> int:
        """Threads per call."""
        return self._threads

    def set_threads(self, threads: int) -> None:
        """Use ``threads`` threads per call: at most as many as Numba has, and 1 without a safe threading layer."""
        self._threads = max(1, min(threads, numba.config.NUMBA_NUM_THREADS)) if self._layer else 1

    def describe(self) -> str:
        """One line for a log: what runs, on how many threads, and why."""
        if self._layer is None:
            return f"numba {numba.__version__}, 1 thread (no threading layer that two threads may enter: install tbb)"
        return f"numba {numba.__version__}, {self._threads} thread(s), threading layer {self._layer}"

    def warm_up(self, dtype: str = "float32") -> None:
        """Compile every kernel for buckets of ``dtype``, or load it from the cache, so that no step waits for it."""
        kind = np.dtype(dtype)
        n = LARGE
        g = np.ones(n, kind)
        u, v = np.zeros(n, kind), np.zeros(n, kind)
        control = self.new_control(2)
        work = [SegmentWork(g[: n // 4], None, 0, n // 4, 4)]
        self.accumulate(work, u, v)
        self.accumulate_and_select([SegmentWork(g, None, 0, n, 4)], u, v, control[:1])
        few = self.accumulate_and_select(work, u, v, control[1:]).positions
        many = np.arange(0, n, 2)
        for positions in (few, many):
            kept = self.mask(u, v, positions, self.take(v, positions), masking=True)
            self.restore(u, v, kept)
            self.scatter_add([g.copy()], np.array([0, n]), positions, kept.v, 1.0)
        for size in (4, n):
            self.sums_of_squares([g[:size]])
            self.dense_update(
                u[:size].copy(), g[:size], v[:size], None, momentum=0.9, nesterov=False, weight_decay=0.0, scale=1.0
            )

    def new_control(self, segments: int) -> np.ndarray:  # noqa: D102
        return rules.new_control(segments)

    def sums_of_squares(self, gradients: Sequence[np.ndarray]) -> np.ndarray:  # noqa: D102
        out = np.empty(len(gradients))
        lengths = np.array([g.size for g in gradients], np.int64)
        codes = np.array([element_code(g, g.size, "gradient") for g in gradients], np.int64)
        addresses = np.array([address_of(g) for g in gradients], np.int64)
        tiles = np.zeros(len(gradients) + 1, np.int64)
        np.cumsum(-(-lengths // TILE), out=tiles[1:])
        parts = self._parts(int(lengths.sum()))
        self._run(
            sums_of_squares_alone, sums_of_squares_together, parts,
            addresses, codes, lengths, tiles, np.empty((parts, STRIP), np.float32), np.empty((parts, SUM_LANES)),
            np.zeros(1, np.int64), out,
        )  # fmt: skip
        return out

    def accumulate(self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray) -> bool:  # noqa: D102
        return self._pass(work, u, v, None).nonfinite

    def accumulate_and_select(  # noqa: D102
        self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, control: np.ndarray
    ) -> Selection:
        return self._pass(work, u, v, control)

    def take(self, array: np.ndarray, positions: np.ndarray) -> np.ndarray:  # noqa: D102
        _check_positions(positions, array.size)
        out = np.empty(positions.size, array.dtype)
        self._run(gather_alone, gather_together, self._parts(PLACE * positions.size), array, positions, out)
        return out

    def mask(  # noqa: D102
        self, u: np.ndarray, v: np.ndarray, positions: np.ndarray, decoded: np.ndarray, *, masking: bool
    ) -> Kept:
        _check_positions(positions, min(u.size, v.size))
        k = positions.size
        decoded = np.ascontiguousarray(decoded, v.dtype)
        if decoded.shape != (k,):
            raise LayoutError(f"{decoded.size} decoded values were given for {k} positions")
        kept = Kept(positions, np.empty(k, u.dtype), np.empty(k, v.dtype))
        self._run(mask_alone, mask_together, self._parts(PLACE * k), u, v, positions, decoded, masking, kept.u, kept.v)
        return kept

    def restore(self, u: np.ndarray, v: np.ndarray, kept: Kept) -> None:  # noqa: D102
        _check_positions(kept.positions, min(u.size, v.size))
        parts = self._parts(PLACE * kept.positions.size)
        self._run(restore_alone, restore_together, parts, u, v, kept.positions, kept.u, kept.v)

    def scatter_add(  # noqa: D102
        self,
        results: Sequence[np.ndarray],
        offsets: np.ndarray,
        positions: np.ndarray,
        values: np.ndarray,
        factor: float,
    ) -> None:
        if positions.size == 0:
            return
        kind = results[0].dtype if results else np.dtype(np.float32)
        for s, result in enumerate(results):
            if result.dtype != kind or kind not in (np.float32, np.float64) or not result.flags.c_contiguous:
                raise LayoutError(f"result {s} is {result.dtype}; all must be contiguous float32, or all float64")
        if values.shape != positions.shape:
            raise LayoutError(f"{values.size} values were given for {positions.size} positions")
        addresses = np.array([address_of(r) for r in results], np.int64)
        lengths = np.minimum(np.array([r.size for r in results], np.int64), np.diff(offsets))
        parts = self._parts(PLACE * positions.size)
        done = np.zeros(parts, np.bool_)
        self._run(
            scatter_add_alone, scatter_add_together, parts,
            addresses, lengths, offsets, positions, np.ascontiguousarray(values, kind),
            np.array([factor], kind), done,
        )  # fmt: skip
        if not done.all():
            raise LayoutError("a position lies in the padding between tensors; nothing is ever selected there")

    def dense_update(  # noqa: D102
        self,
        result: np.ndarray,
        mean: np.ndarray,
        u: np.ndarray,
        parameter: np.ndarray | None,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        scale: float,
    ) -> None:
        n = result.size
        if mean.shape != (n,) or u.shape != (n,):
            raise LayoutError(f"a result of {n} elements was given a mean of {mean.size} and a momentum of {u.size}")
        if parameter is None:
            weight_decay = 0.0
        parts = self._parts(n)
        strips = (parts, STRIP if parameter is not None and weight_decay else 0)
        self._run(
            update_alone, update_together, parts, result, mean, u,
            address_of(parameter) if parameter is not None and weight_decay else 0,
            element_code(parameter, n, "parameter") if parameter is not None and weight_decay else 0,
            float(momentum), bool(nesterov), float(weight_decay), float(scale),
            np.empty(strips, result.dtype),
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------------------------

    def _parts(self, elements: int) -> int:
        return 1 if elements < ALONE else self._threads

    def _run(self, alone: Callable[..., None], together: Callable[..., None], parts: int, *arguments: Any) -> Any:
        """Call a kernel on ``parts`` threads. Numba's own setting, one for each Python thread, is left as it was."""
        if parts == 1 and alone is not together:
            return alone(1, *arguments)
        before = numba.get_num_threads()
        numba.set_num_threads(parts)
        try:
            return together(parts, *arguments)
        finally:
            numba.set_num_threads(before)

    def _pass(self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, control: np.ndarray | None) -> Selection:
        kind = _check_state(u, v)
        integers, reals = make_table(work, v.size)
        segments, selecting = len(work), control is not None
        if control is None:
            control = np.empty((segments, rules.COLUMNS))
        elif control.shape != (segments, rules.COLUMNS) or not control.flags.c_contiguous:
            raise LayoutError(f"control has shape {control.shape}; expected ({segments}, {rules.COLUMNS}), contiguous")
        chunks, room, count, elements = prepare(integers, reals, control, selecting, np.empty(1, kind))
        workers = self._parts(elements)
        scratch = self._workspace.scratch(kind, workers, segments, chunks, room)
        positions, values = np.empty(count, np.int64), np.empty(count, kind)
        taken, nonfinite = np.empty(segments, np.int64), np.empty(workers, np.int64)
        # Alone or together, not both: the two take long to compile.
        self._run(
            pass_together if self._threads > 1 else pass_alone, pass_together, workers,
            integers, reals, control, u, v, selecting, room, chunks, scratch.chunks, scratch.left, scratch.tickets,
            scratch.positions, scratch.values, scratch.spent, scratch.wide, scratch.bins,
            scratch.likes, nonfinite, taken, positions, values,
        )  # fmt: skip
        if selecting:
            if taken.min(initial=0) == UNFINISHED:
                unfinished = np.flatnonzero(taken == UNFINISHED)
                self._select_by_histogram(integers, control, unfinished, v, scratch, workers, positions, values, taken)
            if int(taken.sum()) < count:
                positions, values = _without_gaps(integers, taken, positions, values)
        return Selection(positions, bool(nonfinite.any()), values)

    def _select_by_histogram(
        self,
        integers: np.ndarray,
        control: np.ndarray,
        unfinished: np.ndarray,
        v: np.ndarray,
        scratch: _Scratch,
        workers: int,
        positions: np.ndarray,
        values: np.ndarray,
        taken: np.ndarray,
    ) -> None:
        bits = bits_of(v)
        bins, likes = scratch.bins, scratch.likes
        keys, wider = np.zeros(len(integers), np.int64), np.zeros(len(integers), np.int64)
        lengths = integers[unfinished, LENGTH]
        small = unfinished[lengths < LARGE]
        if small.size:
            parts = min(workers, small.size)
            self._run(
                small_alone, small_together, parts,
                v, bits, integers, small, bins, likes, np.zeros(1, np.int64), positions, values, taken, keys, wider,
            )  # fmt: skip
        tallies = np.empty((workers, 2), np.int64)
        for s in unfinished[lengths >= LARGE]:
            offset, length, k, out = (int(integers[s, column]) for column in (OFFSET, LENGTH, ENTRIES, OUT))
            taken[s], keys[s], wider[s] = self._run(
                large_alone, large_together, workers,
                v, bits, offset, length, k, bins, tallies, likes[0], positions, values, out,
            )  # fmt: skip
        magnitudes = keys.astype(bits.dtype).view(v.dtype)
        for s in unfinished:
            kth = float(magnitudes[s])
            rules.learn(control[s], int(integers[s, ENTRIES]), rules.WIDER * kth, int(wider[s]), kth)


def _check_state(u: np.ndarray, v: np.ndarray) -> np.dtype:
    kind = v.dtype
    if kind not in (np.float32, np.float64) or u.dtype != kind:
        raise LayoutError(f"u is {u.dtype} and v is {kind}; both must be float32, or both float64")
    if u.ndim != 1 or v.ndim != 1 or not u.flags.c_contiguous or not v.flags.c_contiguous or u.size < v.size:
        raise LayoutError("u and v must be contiguous and 1-D, u not shorter than v")
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
