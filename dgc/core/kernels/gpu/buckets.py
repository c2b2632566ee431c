"""Operations of whole buckets as sequences of CUDA kernels, run by a ``Runtime``: a launch costs like a small tensor.

Letters: n elements of a bucket's flat space, S segments, k entries, P ranks. u, v, gradients, parameters and results
are device arrays; positions, values and means cross as NumPy arrays. Nothing waits for the device but what has to hand
numbers to the host, and that once: the methods say so. All work is on one stream, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc.core.kernels.base import SegmentWork, Undo
from dgc.core.kernels.gpu.cuda.source import THREADS
from dgc.core.kernels.gpu.memory import Runtime, Tables, Workspace
from dgc.core.kernels.gpu.selection import Selector
from dgc.core.kernels.gpu.tables import SUMMARY, TARGET, DenseTensor, Format, Geometry, tensor_table
from dgc.errors import LayoutError

BLOCKS = 1024
"""Blocks of a kernel that walks over entries: enough to fill a device."""


@dataclass(slots=True)
class Compressed:
    """What :meth:`BucketKernels.compress` leaves: entries sent, whether a non-finite one was met, what to put back."""

    count: int
    nonfinite: bool
    undo: Undo | None


class BucketKernels:
    """What an exchange on a device does with a bucket in a step.

    Safe to call from several threads; they take turns.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Take a runtime over; nothing is compiled yet."""
        self.runtime = runtime
        self._workspace = Workspace(runtime)
        self._tables = Tables(runtime)
        self._geometries: dict[tuple[int, ...], tuple[Geometry, Any, Any]] = {}
        self._host: dict[str, np.ndarray] = {}
        self._lock = threading.RLock()

    def compress(
        self,
        work: Sequence[SegmentWork],
        u: Any,
        v: Any,
        control: np.ndarray,
        form: Format | None,
        payload: np.ndarray,
        dense: Sequence[DenseTensor] = (),
        vector: np.ndarray | None = None,
        *,
        masking: bool = True,
    ) -> Compressed:
        """Update u and v, select, write the message's payload, mask; and pack the dense tensors. Waits once.

        Args:
            work: the sparsified tensors; may be empty.
            u: (n,) device array, in place.
            v: (n',) device array, in place.
            control: (S, COLUMNS) float64, in place.
            form: of the message.
            payload: (m,) uint8, page-locked, m a multiple of 8: receives the payload.
            dense: tensors whose gradients go into the vector.
            vector: (·,) page-locked, receives them; zero between them.
            masking: whether u becomes 0 where v was sent.

        Raises:
            LayoutError: an array is not what a kernel may read.
        """
        with self._lock:
            bits = 8 * np.dtype(u.dtype).itemsize
            if work:
                assert form is not None
                selector = self._selector(work, u, v, control)
                # The positions stay until the step is over: they are what a refused step puts back.
                selected = selector.start(scratch=False)
                sent = self._workspace.get("payload", np.uint8, payload.size)
                k = selected.positions.size
                undo = Undo(selected.positions, self.runtime.empty(k, u.dtype), self.runtime.empty(k, v.dtype))

                def send() -> None:
                    self._launch(
                        "send", bits, min(BLOCKS, max(1, -(-max(payload.size // 8, k) // THREADS))),
                        selected.positions, selected.values, selected.summary, np.int64(v.size), np.int32(form.indices),
                        np.int32(form.values), sent, np.int64(payload.size // 8), u, v, undo.u, undo.v,
                        np.int32(masking),
                    )  # fmt: skip
                    self.runtime.download(payload, sent)
                    selector.download(self._pinned("result", selector.result_bytes))

                send()
            bad = self._pack(dense, vector, bits)
            self.wait()
            nonfinite = bool(bad is not None and bad["nonfinite"][0])
            if not work:
                return Compressed(0, nonfinite, None)
            while not selector.settle():
                send()
                self.wait()
            undo = Undo(undo.positions[: selector.count], undo.u[: selector.count], undo.v[: selector.count])
            return Compressed(selector.count, nonfinite or selector.nonfinite, undo)

    def receive(
        self,
        results: Sequence[Any],
        offsets: np.ndarray,
        n: int,
        form: Format,
        messages: Sequence[tuple[np.ndarray, int]],
        factor: float,
    ) -> None:
        """Set the results to the sum over all ranks' messages, in rank order, times ``factor``. Does not wait.

        Args:
            results: S device arrays of the state's type.
            offsets: (S + 1,) int64, where each begins in the bucket.
            n: elements of the bucket's sparsified part.
            form: of the messages, which have been checked.
            messages: per rank the payload, (m,) uint8 page-locked, which must stay until the next :meth:`compress`
                returns, and its number of entries.
            factor: see above.
        """
        if not results:
            return
        with self._lock:
            bits = 8 * np.dtype(results[0].dtype).itemsize
            self._over_tensors("clear", bits, [DenseTensor(result=r) for r in results])
            (targets,) = self._tables.send(self._target_table(results, offsets))
            for payload, count in messages:
                if count == 0:
                    continue
                came = self._workspace.get("came", np.uint8, payload.size)
                self.runtime.upload(came, payload)
                self._launch(
                    "receive", bits, form.blocks(n, count), came, np.int64(n), np.int32(form.indices),
                    np.int32(form.values), np.int32(count), targets, np.int32(len(results)), np.float64(factor),
                )  # fmt: skip

    def write(self, tensors: Sequence[DenseTensor], vector: np.ndarray, u: Any = None) -> None:
        """Momentum SGD on means (without a momentum: the means times ``scale``) into the results. Does not wait.

        Args:
            tensors: with result, vector, scale, and what the update takes.
            vector: (·,) page-locked; must stay until the next :meth:`compress` returns.
            u: (n,) device array, in place; needed when a tensor has momentum.
        """
        if not tensors:
            return
        with self._lock:
            bits = 8 * vector.dtype.itemsize
            means = self._workspace.get("vector", vector.dtype, vector.size)
            self.runtime.upload(means, vector)
            self._over_tensors("update", bits, tensors, means, means if u is None else u)

    def pack(self, tensors: Sequence[DenseTensor], vector: np.ndarray) -> bool:
        """Pack dense tensors alone, as :meth:`compress` does; returns whether one is not finite. Waits."""
        with self._lock:
            met = self._pack(tensors, vector, 8 * vector.dtype.itemsize)
            self.wait()
            return met is not None and bool(met["nonfinite"][0])

    def exceeds(self, tensors: Sequence[DenseTensor], vector: np.ndarray, u: Any) -> bool:
        """Whether a result is not finite or beyond its ``limit``. Waits; only narrow types have a limit.

        Args:
            tensors: sparsified ones with ``vector`` -1, whose results are looked at as they are, and dense ones as for
                :meth:`write`, which would come next.
            vector: see :meth:`write`.
            u: see :meth:`write`.
        """
        if not tensors:
            return False
        with self._lock:
            means = self._workspace.get("vector", vector.dtype, vector.size)
            self.runtime.upload(means, vector)
            (summary,) = self._tables.send(np.zeros(1, SUMMARY))
            self._over_tensors("exceeds", 8 * vector.dtype.itemsize, tensors, means, u, summary)
            return self._flag(summary)

    def allocate_with(self, allocate: Callable[[int, int], int], free: Callable[[int], None]) -> None:
        """Take device memory from a framework; see :class:`~dgc.core.kernels.gpu.memory.Runtime`."""
        with self._lock:
            self.wait()
            self._workspace.clear()
            self.runtime.allocate_with(allocate, free)

    def wait(self) -> None:
        """Wait until everything enqueued so far has run."""
        with self._lock:
            self.runtime.synchronize(self.runtime.record())
            self._tables.all_arrived()

    # -- inside --------------------------------------------------------------------------------------------------

    def _launch(self, name: str, bits: int, grid: int, *arguments: Any) -> None:
        self.runtime.launch(name, bits, grid, arguments)

    def _over_tensors(self, name: str, bits: int, tensors: Sequence[DenseTensor], *arguments: Any) -> None:
        geometry, tile_tensor, _ = self._geometry([t.length for t in tensors])
        if geometry.tiles:
            (table,) = self._tables.send(tensor_table(tensors, geometry, bits, self.runtime.address))
            self._launch(name, bits, geometry.tiles, table, tile_tensor, *arguments)

    def _pack(self, dense: Sequence[DenseTensor], vector: np.ndarray | None, bits: int) -> np.ndarray | None:
        """Enqueue the dense tensors' way into the vector; returns the (1,) SUMMARY that will say what was met."""
        if vector is None or vector.size == 0:
            return None
        packed = self._workspace.get("vector", vector.dtype, vector.size)
        self.runtime.fill(packed, 0)
        (summary,) = self._tables.send(np.zeros(1, SUMMARY))
        self._over_tensors("pack", bits, dense, packed, summary)
        self.runtime.download(vector, packed)
        met = self._pinned("packed", SUMMARY.itemsize)
        self.runtime.download(met, summary)
        return met.view(SUMMARY)

    def _flag(self, summary: Any) -> bool:
        met = self._pinned("flag", SUMMARY.itemsize)
        self.runtime.download(met, summary)
        self.wait()
        return bool(met.view(SUMMARY)["nonfinite"][0])

    def _target_table(self, results: Sequence[Any], offsets: np.ndarray) -> np.ndarray:
        table = np.zeros(len(results), TARGET)
        table["result"] = [self.runtime.address(r) for r in results]
        table["offset"] = offsets[:-1]
        table["length"] = np.minimum([r.size for r in results], np.diff(offsets))
        return table

    def _selector(self, work: Sequence[SegmentWork], u: Any, v: Any, control: np.ndarray | None) -> Selector:
        if v.dtype not in (np.float32, np.float64) or u.dtype != v.dtype or u.size < v.size:
            given = f"u is {u.dtype} ({u.size}) and v is {v.dtype} ({v.size})"
            raise LayoutError(f"{given}; both must be float32, or both float64")
        geometry = self._geometry([w.length for w in work])
        return Selector(self.runtime, self._workspace, self._tables, geometry, work, u, v, control)

    def _geometry(self, lengths: Sequence[int]) -> tuple[Geometry, Any, Any]:
        """The tiles of these lengths, and their maps on the device; made once."""
        key = tuple(lengths)
        known = self._geometries.get(key)
        if known is None:
            geometry = Geometry(lengths)
            maps = []
            for array in (geometry.tile_segment, geometry.span_tile):
                device = self.runtime.empty(array.size, array.dtype)
                if array.size:
                    host = self.runtime.host_array(array.size, array.dtype)
                    host[:] = array
                    self.runtime.upload(device, host)
                maps.append(device)
            # Page-locked sources must outlive their copies.
            self.wait()
            known = self._geometries[key] = (geometry, maps[0], maps[1])
        return known

    def _pinned(self, name: str, nbytes: int) -> np.ndarray:
        """Page-locked scratch by name, (nbytes,) uint8."""
        array = self._host.get(name)
        if array is None or array.size < nbytes:
            array = self._host[name] = self.runtime.host_array(max(64, nbytes + nbytes // 4), np.uint8)
        return array[:nbytes]
