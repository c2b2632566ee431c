"""The choice among candidates that a device has found: by the functions with which the CPU backend chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.kernels.base import SegmentWork, Selection
from dgc.core.kernels.compile import entry
from dgc.core.kernels.cpu.select_candidates import CHUNK, UNFINISHED, _conclude, prepare, without_gaps
from dgc.core.kernels.cpu.select_radix import select_whole
from dgc.core.kernels.cpu.simd import bits_of
from dgc.core.kernels.cpu.threads import Team
from dgc.core.kernels.cpu.work_table import ENTRIES, INTEGERS, LENGTH, MOST, OFFSET, OUT, REALS, USED


@entry()
def _choose(integers, reals, thresholds, positions, values, starts, counts, like, taken, out_positions, out_values):
    bits = bits_of(values)
    for s in range(len(integers)):
        taken[s] = _conclude(
            integers, reals, thresholds, s, positions, values, bits, starts, counts, like, out_positions, out_values
        )


class Choice:
    """One bucket's choice in one step.

    Attributes:
        limits: (S,) float64, the least magnitude of each segment's candidates; infinity where there are none.
        most: (S,) int64, how many candidates of each segment are kept; of one with more, none is used.
        room: how many that makes.
    """

    def __init__(self, work: Sequence[SegmentWork], thresholds: np.ndarray, kind: np.dtype) -> None:
        """Take the work of a pass and what is known from those before it: (S, COLUMNS), updated."""
        self._thresholds, self._kind = thresholds, kind
        self._integers, self._reals = np.zeros((len(work), INTEGERS), np.int64), np.zeros((len(work), REALS))
        self._integers[:, OFFSET] = [w.offset for w in work]
        self._integers[:, LENGTH] = [w.length for w in work]
        self._integers[:, ENTRIES] = [max(0, min(w.k, w.length)) for w in work]
        _, _, self._k, _ = prepare(self._integers, self._reals, thresholds, True, np.empty(1, kind))
        self.most = self._integers[:, MOST]
        self.limits = np.where(self.most > 0, self._reals[:, USED], np.inf)
        self.room = int(self.most.sum())
        self._positions, self._values = np.empty(self._k, np.int64), np.empty(self._k, kind)
        self._taken = np.full(len(work), UNFINISHED)

    def among(self, places: np.ndarray, values: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Choose among candidates; returns the segments, by number, that need :meth:`among_all`.

        Args:
            places: (n,) int32 in the bucket, in any order.
            values: (n,) of the state's type.
            totals: (S,) how many candidates each segment had, with those that were not kept.
        """
        order = np.argsort(places)
        places, values = places[order], values[order]
        # A segment's candidates are one run; the CPU's own are one for each of its chunks.
        offsets, lengths = self._integers[:, OFFSET], self._integers[:, LENGTH]
        chunks = -(-lengths // CHUNK)
        first = np.cumsum(chunks) - chunks
        starts, counts = np.zeros(int(chunks.sum()), np.int64), np.zeros(int(chunks.sum()), np.int64)
        used = lengths > 0
        starts[first[used]] = np.searchsorted(places, offsets[used])
        counts[first[used]] = np.searchsorted(places, offsets[used] + lengths[used]) - starts[first[used]]
        counts[first[used & (totals > self.most)]] = UNFINISHED
        _choose(
            self._integers, self._reals, self._thresholds, places, values, starts, counts, np.empty(1, self._kind),
            self._taken, self._positions, self._values,
        )  # fmt: skip
        return np.flatnonzero(self._taken == UNFINISHED)

    def span(self, which: np.ndarray) -> slice:
        """Where in the bucket those segments lie, and what is between them."""
        offsets = self._integers[which, OFFSET]
        return slice(int(offsets[0]), int(offsets[-1] + self._integers[which[-1], LENGTH]))

    def among_all(self, which: np.ndarray, v: np.ndarray, team: Team, threads: int) -> None:
        """Choose among all entries of these segments: ``v`` is that of their :meth:`span`."""
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
        """What was chosen of all segments, in order."""
        positions, values = self._positions, self._values
        if int(self._taken.sum()) < self._k:
            positions, values = without_gaps(self._integers, self._taken, positions, values)
        return Selection(positions, nonfinite, values)
