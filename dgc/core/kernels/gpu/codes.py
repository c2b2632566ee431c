"""Scales and codes of whole buckets, written and read by the device; see codes.cu.

Letters: n elements of a bucket's flat space, T tensors. v and results are device arrays, messages NumPy arrays.
Every method waits once: its caller needs what it returns before it can go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc.core.kernels.base import Array
from dgc.core.kernels.gpu.buckets import BucketKernels, together
from dgc.core.kernels.gpu.cuda.source import ROWS, THREADS, TILE, WARPS

CODED = np.dtype(
    [(name, np.uint64) for name in ("values",)]
    + [(name, np.int64) for name in ("length", "scales", "codes", "bytes", "partial")]
    + [("key", np.uint64), ("limit", np.float64), ("scale", np.float32)]
    + [(name, np.int32) for name in ("kind", "bits", "levels", "group", "columns", "inner", "first")]
)
"""One tensor in one launch; ``struct Coded`` of the sources."""
KINDS = {"signed": 0, "span": 1, "sign": 2}


@dataclass(slots=True)
class CodedTensor:
    """One tensor's part in a message of scales and codes."""

    length: int
    kind: str
    """"signed", "span" or "sign"."""
    bits: int
    levels: int
    group: int
    """Elements that share a scale."""
    columns: int
    """Of a sign's matrix: element i is in column ``i // inner % columns``."""
    inner: int
    scales: int
    """Where in a message its scales begin, in bytes: a multiple of 8."""
    codes: int
    """And its codes: a multiple of 4."""
    bytes: int
    """Of its codes, padding included: a multiple of 4."""
    offset: int = 0
    """Where it begins in v."""
    key: int = 0
    scale: float = -1.0
    """Of the whole tensor; below 0: one for each group, or two for each column, that the device finds."""
    limit: float = math.inf

    @property
    def rows(self) -> int:
        """Elements of a sign's column."""
        return self.length // self.columns


_FIELDS = "length scales codes bytes key limit scale bits levels group columns inner".split()


class CodeKernels(BucketKernels):
    """What an exchange on a device does with the tensors that are sent in few bits."""

    def moments(self, v: Array, tensors: Sequence[CodedTensor]) -> list[np.ndarray]:
        """For each tensor (tiles, 3) float64: largest magnitude, sum, and squares' sum about the mean, by tile."""
        with self.lock:
            counts = [-(-t.length // TILE) for t in tensors]
            out = self._workspace.get("moments", np.float64, 3 * sum(counts))
            host = self._scratch.host("moments", out.nbytes).view(np.float64)
            self._over_parts("moments", v, tensors, counts, out)
            self.runtime.download(host, out)
            self.wait()
            return [part.copy() for part in np.split(host.reshape(-1, 3), np.cumsum(counts)[:-1])]

    def write_codes(self, v: Array, tensors: Sequence[CodedTensor], payload: np.ndarray, norm: str = "") -> None:
        """Round all tensors, and write their scales and codes.

        Args:
            v: (n,) device array, read only.
            tensors: T of them; their blocks fill the message.
            payload: (m,) uint8 on the host, of any content, m a multiple of 8: receives the message.
            norm: "l2" or "max": of each group where tensors have no scale.
        """
        with self.lock:
            message = self._workspace.get("codes", np.uint8, payload.size)
            grouped = [t for t in tensors if t.scale < 0 and t.kind != "sign"]
            groups = [-(-t.length // t.group) for t in grouped]
            self._over_parts(
                "norms", v, grouped, [-(-g // WARPS) for g in groups], message, np.int32(norm == "l2")
            )  # fmt: skip
            self._column_means(v, [t for t in tensors if t.kind == "sign"], message)
            self._over_parts("encode", v, tensors, [-(-t.bytes // TILE) for t in tensors], message)
            self.runtime.download(payload, message)
            self.wait()

    def add_codes(
        self,
        targets: Sequence[Any],
        tensors: Sequence[CodedTensor],
        messages: Sequence[np.ndarray],
        factor: float,
        *,
        adds: bool = False,
    ) -> tuple[bool, bool]:
        """Add up what messages hold, in their order, times ``factor``.

        Args:
            targets: T device arrays, the results; or one, v, where each tensor has its offset.
            tensors: T of them.
            messages: (m,) uint8 each, on the host, of one size; scales have been checked.
            factor: see above.
            adds: to what the targets hold, and not in its place.

        Returns:
            Whether a code is none that a sender writes, and whether a sum is not finite.
        """
        with self.lock:
            met = self._scratch.host("met", 8).view(np.int32)
            met[:] = 0
            whole, stride = together(messages, self._tables)
            came = self._workspace.get("came", np.uint8, whole.size)
            self.runtime.upload(came, whole)
            counts = [-(-t.length // TILE) for t in tensors]
            self._over_parts(
                "decode", targets, tensors, counts, came, np.int64(stride), np.int32(len(messages)),
                np.float64(factor), np.int32(adds), met,
            )  # fmt: skip
            self.wait()
            return bool(met[0]), bool(met[1])

    # -- inside --------------------------------------------------------------------------------------------------

    def _column_means(self, v: Array, tensors: Sequence[CodedTensor], message: Array) -> None:
        """The means of either sign of all columns: partial sums, then their sums."""
        if not tensors:
            return
        pieces = [-(-t.rows // (ROWS if t.inner == 1 else TILE)) for t in tensors]
        sizes = [p * t.columns for p, t in zip(pieces, tensors, strict=True)]
        partial = np.cumsum(sizes) - sizes
        low, high = (self._workspace.get(name, np.float64, sum(sizes)) for name in ("low", "high"))
        above = self._workspace.get("above", np.int32, sum(sizes))
        for name, strided in (("split_rows", True), ("split_runs", False)):
            mine = [i for i, t in enumerate(tensors) if (t.inner == 1) is strided]
            across = [-(-tensors[i].columns // THREADS) if strided else tensors[i].columns for i in mine]
            blocks = [pieces[i] * a for i, a in zip(mine, across, strict=True)]
            self._over_parts(name, v, [tensors[i] for i in mine], blocks, low, high, above, partial=partial[mine])
        columns = [-(-t.columns // THREADS) for t in tensors]
        self._over_parts("means", v, tensors, columns, low, high, above, message, partial=partial)

    def _over_parts(
        self,
        name: str,
        values: Array,
        tensors: Sequence[CodedTensor],
        blocks: Sequence[int],
        *arguments: object,
        partial: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Launch a kernel with so many blocks for each tensor; ``values``: v, or an array for each tensor."""
        counts = np.array(blocks, np.int64)
        total = int(counts.sum())
        if total == 0:
            return
        table = np.zeros(len(tensors), CODED)
        own = isinstance(values, (list, tuple))
        dtype = np.dtype((values[0] if own else values).dtype)
        address = self.runtime.address
        for field in _FIELDS:  # not row by row, which takes four times as long with hundreds of tensors
            table[field] = [getattr(t, field) for t in tensors]
        table["kind"] = [KINDS[t.kind] for t in tensors]
        starts = [address(a) for a in values] if own else [address(values) + dtype.itemsize * t.offset for t in tensors]
        table["values"] = starts
        table["partial"] = 0 if partial is None else partial
        table["first"] = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(tensors), dtype=np.int32), counts)
        rows, owners = self._tables.send(table, owner)
        self._launch(name, 8 * dtype.itemsize, total, rows, owners, *arguments)
