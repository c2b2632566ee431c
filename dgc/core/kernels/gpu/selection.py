"""The order of kernels that updates one bucket and finds its k largest entries; see sweep.cu and select.cu.

Letters: S segments, k entries in all. The host waits once, for the results; only when a threshold turned out to be
useless (no candidates, too many) the segments concerned are searched as a whole, which costs a second wait. Where all
segments have short lists of candidates, which is the rule, two kernels do all: ``sweep`` and ``choose``.

The thresholds are controlled on the host, in the form that the device's tables have. The rules are those of the CPU
backend (``threshold``); the numbers that go in come from the device with the message, so that the next thresholds cost
no wait of their own, and rows stay equal to the CPU's bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# It also registers the rules of the threshold with Numba.
import dgc.core.kernels.cpu.select_candidates  # noqa: F401
from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import Array, SegmentWork
from dgc.core.kernels.compile import entry
from dgc.core.kernels.gpu.cuda.source import BIN_BITS, BINS, WARPS
from dgc.core.kernels.gpu.memory import Runtime, Tables, Workspace
from dgc.core.kernels.gpu.tables import (
    BEYOND_BINS,
    CANDIDATES,
    CHOSEN,
    DONE,
    FOUND,
    SEGMENT,
    SUMMARY,
    WHOLE,
    Geometry,
    fill_segments,
)
from dgc.core.kernels.threshold import COLUMNS, WIDER
from dgc.errors import LayoutError

NEVER = 2**63 - 1
"""A key that no entry reaches."""
SHORT = 65536
"""Room for candidates up to which one block chooses a segment's entries: the list is read in a few hundred rounds at
most, and as a rule, with a third of the room filled, in less than that. Longer ones are spread over many blocks."""
TILES = 8192
"""Tiles of a segment up to which that block adds up how many candidates each has."""


@entry()
def _predict(thresholds: np.ndarray, ks: np.ndarray, lengths: np.ndarray, out: np.ndarray, most: np.ndarray) -> None:
    for s in range(len(ks)):
        out[s] = rules.threshold(thresholds[s], ks[s], lengths[s])
        most[s] = rules.most_candidates(ks[s], lengths[s])


@entry()
def _learn(
    thresholds: np.ndarray, ks: np.ndarray, used: np.ndarray, totals: np.ndarray, kths: np.ndarray, wider: np.ndarray
) -> None:
    for s in range(len(ks)):
        if ks[s] == 0:
            continue
        kth, reached = kths[s], used[s]
        if kth < 0:
            # Fewer candidates than k: everything that is not zero, or an estimate.
            kth = rules.estimate(thresholds[s], ks[s], reached, totals[s]) if reached > 0 else 0.0
        elif wider[s]:
            reached = rules.WIDER * kth
        rules.learn(thresholds[s], ks[s], reached, totals[s], kth)


def set_thresholds(table: np.ndarray, thresholds: np.ndarray | None, dtype: np.dtype, whole: int) -> np.ndarray:
    """Fill the columns of a SEGMENT table that depend on the thresholds.

    Args:
        table: (S,) of SEGMENT with k and length, in place.
        thresholds: (S, COLUMNS) float64; None collects nothing at all.
        dtype: the state's type, to which thresholds are rounded.
        whole: the code of a segment that is searched as a whole after the pass; others get 0.

    Returns:
        (S,) float64, the thresholds as they will be used; 0 where every entry that is not zero is a candidate.
    """
    table["source"] = whole
    table["key"] = NEVER
    if thresholds is None:
        return np.zeros(len(table))
    ks, lengths = table["k"].astype(np.int64), table["length"].astype(np.int64)
    used, most = np.empty(len(table)), np.empty(len(table), np.int64)
    _predict(thresholds, ks, lengths, used, most)
    with np.errstate(over="ignore"):
        rounded = used.astype(dtype)
    keys = np.maximum(rounded.view(f"u{dtype.itemsize}").astype(np.uint64), np.uint64(1))
    collects = np.isfinite(rounded) & (ks > 0)
    table["key"] = np.where(collects, keys, np.uint64(NEVER))
    # Nothing to send from a segment: it has no candidates, which is all of them.
    table["source"] = np.where(collects | (ks == 0), 0, whole)
    table["open"] = keys > 1
    # As the CPU backend decides: too few when total < ENOUGH * k.
    table["fewest"] = np.ceil(rules.ENOUGH * ks).astype(np.int64)
    most = np.where(collects, most, 0)
    table["most"] = most
    table["room"] = np.cumsum(most) - most
    return np.where(collects & (keys > 1), rounded.astype(np.float64), 0.0)


def learn(
    thresholds: np.ndarray,
    ks: np.ndarray,
    used: np.ndarray,
    totals: np.ndarray,
    kth_keys: np.ndarray,
    wider: np.ndarray,
    dtype: np.dtype,
) -> None:
    """Update the thresholds after a pass.

    Args:
        thresholds: (S, COLUMNS) float64, in place.
        ks: (S,) entries that were to be selected.
        used: (S,) float64 thresholds.
        totals: (S,) entries that reached them.
        kth_keys: (S,) uint64 keys of the k-th largest; NEVER where there were fewer candidates than k.
        wider: (S,) bool, where the entries were counted at WIDER times the k-th largest magnitude instead.
        dtype: the state's type.
    """
    bits = np.dtype(f"u{dtype.itemsize}")
    short = kth_keys == NEVER
    kths = np.where(short, 0, kth_keys).astype(bits).view(dtype).astype(np.float64)
    kths[short] = -1.0
    # A key beyond infinity is a NaN; the rules take both for "unknown".
    kths[np.isnan(kths)] = math.inf
    _learn(thresholds, ks.astype(np.int64), used, totals.astype(np.int64), kths, wider)


_I32 = np.int32


@dataclass
class Selected:
    """A selection under way, on the device.

    ``positions`` (k,) int32 and ``values`` (k,): each segment's entries begin at its ``place``. ``segments``, ``found``
    and ``summary`` are the bytes of those tables.
    """

    positions: Array
    values: Array
    segments: Array
    found: Array
    summary: Array


class Selector:
    """One pass over one bucket: :meth:`start`, what else is to be enqueued, then :meth:`finish` with what came of it.

    Until it is finished, other buckets may be begun on the same stream: what has to stay is in ``own``.
    """

    def __init__(
        self,
        runtime: Runtime,
        workspace: Workspace,
        own: Workspace,
        tables: Tables,
        geometry: tuple[Geometry, Any, Any],
        work: Sequence[SegmentWork],
        u: Array,
        v: Array,
        thresholds: np.ndarray | None,
    ) -> None:
        """Fill the tables.

        Args:
            runtime: where to run.
            workspace: scratch, shared with other passes on the same stream.
            own: scratch of this bucket.
            tables: carries the tables over.
            geometry: of the segments' lengths, and its tile_segment and span_tile on the device.
            work: the segments.
            u: the state, as ``v``.
            v: (n,) device array.
            thresholds: (S, COLUMNS) float64, or None to select nothing.

        Raises:
            LayoutError: an array or a segment is not what a kernel may touch.
        """
        if thresholds is not None and thresholds.shape != (len(work), COLUMNS):
            raise LayoutError(f"thresholds have shape {thresholds.shape}; expected ({len(work)}, {COLUMNS})")
        self._runtime, self._workspace, self._own, self._tables = runtime, workspace, own, tables
        self._geometry, self._tile_segment, self._span_tile = geometry
        self._u, self._v, self._thresholds = u, v, thresholds
        self._dtype = np.dtype(v.dtype)
        self._bits = 8 * self._dtype.itemsize
        self.segments = np.zeros(len(work), SEGMENT)
        fill_segments(self.segments, work, self._geometry, v.size, runtime.address)
        self._used = set_thresholds(self.segments, thresholds, self._dtype, WHOLE)
        self._found = np.zeros(len(work), FOUND)
        self._summary = np.zeros(1, SUMMARY)
        self._whole = self.segments["source"] == WHOLE
        self._beyond_totals = np.zeros(len(work), np.int32)

    @property
    def k(self) -> int:
        """Entries to select, at most."""
        return int(self.segments["k"].sum(dtype=np.int64))

    def start(self) -> Selected:
        """Enqueue the update of u and v, and with thresholds the selection."""
        get, tiles, segments = self._workspace.get, self._geometry.tiles, self.segments
        room = int(segments["most"].sum(dtype=np.int64))
        self._runs = get("runs", np.uint64, tiles)
        self._positions = get("positions", np.int32, room)
        self._values = get("values", self._dtype, room)
        self._bins = get("bins", np.uint32, len(segments) * BINS, zeros=True)
        self._sums = get("sums", np.uint64, tiles)
        k = self.k if self._thresholds is not None else 0
        tables = self._send()
        own = self._own.get
        self.selected = Selected(own("chosen", np.int32, k), own("chosen_values", self._dtype, k), *tables)
        if tiles:
            self._launch(
                "sweep", tiles, self.selected.segments, self._tile_segment, self._u, self._v, self._runs,
                self._positions, self._values, self._bins, self.selected.found, self.selected.summary,
            )  # fmt: skip
        if self._thresholds is None or not len(segments):
            return self.selected
        listed = (segments["source"] == CANDIDATES).all()
        if listed and segments["most"].max() <= SHORT and segments["tiles"].max() <= TILES:
            self._launch(
                "choose", len(segments), self.selected.segments, self._runs, self._positions, self._values, self._bins,
                self._sums, self.selected.positions, self.selected.values, self.selected.found, self.selected.summary,
                _I32(len(segments)),
            )  # fmt: skip
        else:
            self._select(begin=True)
        return self.selected

    def download(self, host: np.ndarray) -> None:
        """Enqueue the copy of what is known of the segments. ``host``: (:attr:`result_bytes`,) uint8, page-locked."""
        self._runtime.download(host, self._header[-host.size :])

    @property
    def result_bytes(self) -> int:
        """Size of what :meth:`finish` needs: the tables ``found`` and ``summary``."""
        return self._found.nbytes + SUMMARY.itemsize

    def finish(self, result: np.ndarray) -> bool:
        """After a wait: learn, or search whole segments, which needs another wait.

        Args:
            result: (:attr:`result_bytes`,) uint8, what the device has found.

        Returns:
            Whether the selection is final.
        """
        self._found = result[: self._found.nbytes].view(FOUND).copy()
        self._summary[:] = result[self._found.nbytes :].view(SUMMARY)
        if self._thresholds is None:
            return True
        if self._summary["unfinished"][0]:
            self._search_whole()
            return False
        self._learn(self._found)
        return True

    @property
    def count(self) -> int:
        """Entries selected, once finished."""
        return int(self._summary["count"][0])

    @property
    def nonfinite(self) -> bool:
        """Whether a non-finite entry was met, once a download has come."""
        return bool(self._summary["nonfinite"][0])

    # -- inside --------------------------------------------------------------------------------------------------

    def _launch(self, name: str, grid: int, *arguments: object) -> None:
        self._runtime.launch(name, self._bits, grid, arguments)

    def _send(self) -> tuple[Any, Any, Any]:
        """Bring the tables over, in one copy; found and summary lie side by side, to come back in one."""
        header = np.concatenate(
            [self.segments.view(np.uint8), self._found.view(np.uint8), self._summary.view(np.uint8)]
        )
        (self._header,) = self._tables.send(header)
        segments, found = self.segments.nbytes, self._found.nbytes
        return self._header[:segments], self._header[segments : segments + found], self._header[segments + found :]

    def _select(self, begin: bool) -> None:
        """Enqueue everything after the sweep; with ``begin`` the candidates have not been looked at yet."""
        geometry, count = self._geometry, len(self.segments)
        steps = -(-self._widest(begin) // BIN_BITS)
        if begin:
            self._locate(1)
        for _ in range(steps if geometry.spans else 0):
            self._launch(
                "refine", geometry.spans, self.selected.segments, self._tile_segment, self._span_tile, self._v,
                self._values, self._bins, self.selected.found,
            )  # fmt: skip
            self._locate(0)
        if geometry.tiles:
            warps = -(-geometry.tiles // WARPS)
            tiles = _I32(geometry.tiles)
            common = (self.selected.segments, self._tile_segment, self._runs, self._v)
            self._launch(
                "count", warps, *common, self._values, self.selected.found, self._sums, tiles, np.float64(WIDER),
            )  # fmt: skip
        summary = self.selected.summary
        self._launch("scan", count, self.selected.segments, self._sums, self.selected.found, summary, _I32(count))
        if geometry.tiles:
            self._launch(
                "emit", warps, *common, self._positions, self._values, self.selected.found, self._sums, tiles,
                self.selected.positions, self.selected.values,
            )  # fmt: skip

    def _locate(self, begin: int) -> None:
        self._launch(
            "locate", len(self.segments), self.selected.segments, self._bins, self.selected.found,
            self.selected.summary, _I32(begin),
        )  # fmt: skip

    def _widest(self, begin: bool) -> int:
        """Bits of a key that are still unknown after the first histogram, in the segment where they are most."""
        sign, mantissa = int(self._bits) - 1, 23 if self._bits == 32 else 52
        if not begin or (self.segments["source"] == WHOLE).any():
            return sign
        active = self.segments["k"] > 0
        if not active.any():
            return 0
        return sign - BIN_BITS if (self.segments["open"][active] == 0).any() else mantissa + 1 - BIN_BITS

    def _search_whole(self) -> None:
        """Enqueue the selection again, the unfinished segments from all their entries."""
        found = self._found
        lost = found["status"] != CHOSEN
        # Where only the range of the bins was exceeded, threshold and number of candidates still teach something.
        beyond = found["status"] == BEYOND_BINS
        self._beyond_totals = np.where(beyond, found["total"], 0)
        whole = lost | (self.segments["source"] == WHOLE)
        self._whole = whole
        found["status"] = CHOSEN
        found["low"][lost] = 0
        found["width"][lost] = self._bits - 1
        found["want"][lost] = self.segments["k"][lost]
        found["total"][lost] = 0
        # The others' entries stay where they were put: their candidates may have made room for another bucket's.
        self.segments["source"] = np.where(lost, WHOLE, DONE)
        self._summary["unfinished"] = 0
        self.selected.segments, self.selected.found, self.selected.summary = self._send()
        self._select(begin=False)

    def _learn(self, found: np.ndarray) -> None:
        candidates = ~self._whole
        keys = found["low"].copy()
        keys[candidates & (found["total"] < self.segments["k"])] = NEVER
        beyond = self._beyond_totals > 0
        totals = np.where(beyond, self._beyond_totals, found["total"])
        assert self._thresholds is not None
        learn(self._thresholds, self.segments["k"], self._used, totals, keys, ~candidates & ~beyond, self._dtype)
