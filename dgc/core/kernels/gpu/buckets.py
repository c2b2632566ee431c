"""Operations of whole buckets as sequences of CUDA kernels, run by a ``Runtime``: a launch costs like a small tensor.

Letters: n elements of a bucket's flat space, S segments, k entries, P ranks. u, v, gradients, parameters and results
are device arrays; positions, values and means cross as NumPy arrays. Nothing waits for the device but what has to hand
numbers to the host, and that once: the methods say so. All work is on one stream, in order.

What is small or leaves the device, the kernels read and write where it is, in page-locked memory of the host: messages,
means up to DIRECT bytes, what was found. Copies of their own would cost more than they carry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dgc.core.kernels.base import Array, SegmentWork, Selection
from dgc.core.kernels.gpu.cuda.source import THREADS
from dgc.core.kernels.gpu.memory import Runtime, Tables, Workspace
from dgc.core.kernels.gpu.selection import Selector
from dgc.core.kernels.gpu.tables import SUMMARY, TARGET, DenseTensor, Geometry, tensor_table
from dgc.errors import LayoutError

BLOCKS = 1024
"""Blocks of a kernel that walks over entries: enough to fill a device."""
DIRECT = 1 << 20
"""Bytes of a dense vector that kernels read and write in the host's memory. Larger ones are copied by the device's copy
engines, while its processors work for the backward pass."""
FEW_TILES = 1024
"""Blocks that may each read their line of a table across the bus."""


class Scratch:
    """Memory of one bucket, from the beginning to the end of its step: buckets that are begun together share none."""

    def __init__(self, runtime: Runtime) -> None:
        """Allocate nothing yet."""
        self._runtime = runtime
        self.device = Workspace(runtime)
        self._host: dict[str, np.ndarray] = {}

    def host(self, name: str, nbytes: int) -> np.ndarray:
        """Page-locked, (nbytes,) uint8, by name."""
        array = self._host.get(name)
        if array is None or array.size < nbytes:
            array = self._host[name] = self._runtime.host_array(max(64, nbytes + nbytes // 4), np.uint8)
        return array[:nbytes]


class Begun:
    """A bucket whose compression is enqueued; :meth:`finish` waits for it, unless a later bucket's wait has come."""

    def __init__(self, kernels: BucketKernels, ticket: int, met: np.ndarray | None) -> None:
        """Take the number of the wait that is needed, and the (1,) SUMMARY of the dense tensors."""
        self._kernels, self._ticket, self._met = kernels, ticket, met
        self.selector: Selector | None = None
        self.result = np.empty(0, np.uint8)
        self.send: Callable[[], None] = lambda: None
        self.positions = np.empty(0, np.int32)
        self.values = np.empty(0, np.float32)

    def finish(self) -> Selection:
        """What came of it. Waits: for this bucket and all that have been begun by now; again where thresholds fail."""
        kernels = self._kernels
        kernels.wait_for_ticket(self._ticket)
        nonfinite = self._met is not None and bool(self._met["nonfinite"][0])
        if self.selector is None:
            return Selection(np.empty(0, np.int64), nonfinite, np.empty(0, np.float32))
        with kernels.lock:
            while not self.selector.finish(self.result):
                self.send()
                kernels.wait()
        count, nonfinite = self.selector.count, nonfinite or self.selector.nonfinite
        return Selection(self.positions[:count].astype(np.int64), nonfinite, self.values[:count].copy())


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
        self._scratch = Scratch(runtime)
        self._begun = self._arrived = 0  # numbers of what was enqueued for the host to read, and of what has come
        self.lock = threading.RLock()

    def new_scratch(self) -> Scratch:
        """Memory for a bucket that may be begun before another one is finished."""
        return Scratch(self.runtime)

    def compress(self, *arguments: Any, **options: Any) -> Selection:
        """:meth:`begin` and its end. Waits once."""
        return self.begin(*arguments, **options).finish()

    def begin(
        self,
        work: Sequence[SegmentWork],
        u: Array,
        v: Array,
        thresholds: np.ndarray,
        dense: Sequence[DenseTensor] = (),
        vector: np.ndarray | None = None,
        *,
        scratch: Scratch | None = None,
    ) -> Begun:
        """Enqueue: accumulate in u and v, select, write the entries to the host; and pack the dense tensors.

        Args:
            work: the sparsified tensors; may be empty.
            u: (n,) device array, in place.
            v: (n',) device array, in place.
            thresholds: (S, COLUMNS) float64, in place, once finished.
            dense: tensors whose gradients go into the vector.
            vector: (·,) page-locked, receives them; zero in the padding behind each.
            scratch: of the bucket.

        Raises:
            LayoutError: an array is not what a kernel may read.
        """
        with self.lock:
            bits, own = 8 * np.dtype(u.dtype).itemsize, scratch or self._scratch
            # Whatever may be refused is looked at before anything is enqueued.
            selector = self._selector(work, u, v, thresholds, own) if work else None
            packing = self._pack(dense, vector, bits, own)
            if selector is None:
                met = packing()
                return Begun(self, self._ticket(), met)
            count, k = len(work), selector.k
            result = own.host("result", selector.result_bytes)
            positions = own.host("positions", 4 * k).view(np.int32)
            values = own.host("values", v.dtype.itemsize * k).view(v.dtype)
            selected = selector.start()

            def send() -> None:
                self._launch(
                    "send", bits, min(BLOCKS, max(1, -(-k // THREADS))), selected.segments, selected.found,
                    selected.summary, selected.positions, selected.values, np.int32(count), positions, values, result,
                )  # fmt: skip

            send()
            begun = Begun(self, 0, packing())
            begun.selector, begun.result, begun.send = selector, result, send
            begun.positions, begun.values = positions, values
            begun._ticket = self._ticket()
            return begun

    def receive(
        self,
        results: Sequence[Any],
        offsets: np.ndarray,
        entries: Sequence[tuple[np.ndarray, np.ndarray]],
        factor: float,
    ) -> None:
        """Set the results to the sum of all ranks' entries, in rank order, times ``factor``. Does not wait.

        Args:
            results: S device arrays of the state's type.
            offsets: (S + 1,) int64, where each begins in the bucket.
            entries: per rank (k,) ascending positions and (k,) values, on the host.
            factor: see above.
        """
        if not results:
            return
        with self.lock:
            geometry, tile_segment, _ = self._geometry([r.size for r in results])
            if not geometry.tiles:
                return
            kind = np.dtype(results[0].dtype)
            starts = np.cumsum([0, *(places.size for places, _ in entries)], dtype=np.int32)
            positions = np.concatenate([places for places, _ in entries]).astype(np.int32)
            values = np.concatenate([numbers for _, numbers in entries]).astype(kind, copy=False)
            targets = self._target_table(results, offsets)
            targets["first_tile"] = geometry.first_tile
            tables = self._tables.send(positions, values, starts, targets)
            self._launch(
                "receive", 8 * kind.itemsize, geometry.tiles, *tables[:3], np.int32(len(entries)), tables[3],
                tile_segment, np.float64(factor),
            )  # fmt: skip

    def write(self, tensors: Sequence[DenseTensor], vector: np.ndarray, u: Array = None) -> None:
        """Momentum SGD on means (without a momentum: the means times ``scale``) into the results. Does not wait.

        Args:
            tensors: with result, vector, scale, and what the update takes.
            vector: (·,) page-locked; must stay until the next :meth:`compress` returns.
            u: (n,) device array, in place; needed when a tensor has momentum.
        """
        if not tensors:
            return
        with self.lock:
            means = self._means(vector)
            self._over_tensors("update", 8 * vector.dtype.itemsize, tensors, means, means if u is None else u)

    def pack(self, tensors: Sequence[DenseTensor], vector: np.ndarray) -> bool:
        """Pack dense tensors alone, as :meth:`begin` does; returns whether one is not finite. Waits."""
        with self.lock:
            met = self._pack(tensors, vector, 8 * vector.dtype.itemsize, self._scratch)()
            self.wait()
            return met is not None and bool(met["nonfinite"][0])

    def exceeds(self, tensors: Sequence[DenseTensor], vector: np.ndarray, u: Array) -> Callable[[], bool]:
        """Enqueue the question whether a result is not finite or beyond its ``limit``; only narrow types have one.

        Args:
            tensors: sparsified ones with ``vector`` -1, whose results are looked at as they are, and dense ones as for
                :meth:`write`, which would come next.
            vector: see :meth:`write`.
            u: see :meth:`write`.

        Returns:
            The answer. Waits, for all questions that were asked by then.
        """
        if not tensors:
            return lambda: False
        with self.lock:
            met = self.runtime.host_array(1, SUMMARY)
            self._over_tensors("exceeds", 8 * vector.dtype.itemsize, tensors, self._means(vector), u, met)
            ticket = self._ticket()

        def answer() -> bool:
            self.wait_for_ticket(ticket)
            return bool(met["nonfinite"][0])

        return answer

    def allocate_with(self, allocate: Callable[[int, int], int], free: Callable[[int], None]) -> None:
        """Take device memory from a framework; see :class:`~dgc.core.kernels.gpu.memory.Runtime`."""
        with self.lock:
            self.wait()
            self._workspace.clear()
            self.runtime.allocate_with(allocate, free)

    def wait(self) -> None:
        """Wait until everything enqueued so far has run."""
        with self.lock:
            self.runtime.synchronize(self.runtime.record())
            self._tables.all_arrived()
            self._arrived = self._begun

    def wait_for_ticket(self, ticket: int) -> None:
        """Wait until the host may read what was enqueued for it, unless it is known to have come."""
        with self.lock:
            if ticket > self._arrived:
                self.wait()

    # -- inside --------------------------------------------------------------------------------------------------

    def _ticket(self) -> int:
        self._begun += 1
        return self._begun

    def _launch(self, name: str, bits: int, grid: int, *arguments: object) -> None:
        self.runtime.launch(name, bits, grid, arguments)

    def _over_tensors(self, name: str, bits: int, tensors: Sequence[DenseTensor], *arguments: object) -> None:
        geometry, tile_tensor, _ = self._geometry([t.length for t in tensors])
        if geometry.tiles:
            table = tensor_table(tensors, geometry, bits, self.runtime.address)
            send = self._tables.lend if geometry.tiles <= FEW_TILES else self._tables.send
            self._launch(name, bits, geometry.tiles, send(table)[0], tile_tensor, *arguments)

    def _pack(
        self, dense: Sequence[DenseTensor], vector: np.ndarray | None, bits: int, own: Scratch
    ) -> Callable[[], np.ndarray | None]:
        """Check the dense tensors; what comes back enqueues their way, and returns the SUMMARY that will say more."""
        geometry, tile_tensor, _ = self._geometry([t.length for t in dense])
        if vector is None or vector.size == 0:
            return lambda: None
        table = tensor_table(dense, geometry, bits, self.runtime.address)

        def enqueue() -> np.ndarray | None:
            assert vector is not None
            met = own.host("packed", SUMMARY.itemsize).view(SUMMARY)
            met[:] = 0
            direct = vector.nbytes <= DIRECT
            packed = vector if direct else self._workspace.get("vector", vector.dtype, vector.size)
            if geometry.tiles:
                send = self._tables.lend if geometry.tiles <= FEW_TILES else self._tables.send
                self._launch(
                    "pack", bits, geometry.tiles, send(table)[0], tile_tensor, packed, np.int64(vector.size), met
                )
                if not direct:
                    self.runtime.download(vector, packed)
            return met

        return enqueue

    def _means(self, vector: np.ndarray) -> Array:
        """A dense vector where kernels can read it."""
        if vector.nbytes <= DIRECT:
            return vector
        means = self._workspace.get("vector", vector.dtype, vector.size)
        self.runtime.upload(means, vector)
        return means

    def _target_table(self, results: Sequence[Any], offsets: np.ndarray) -> np.ndarray:
        table = np.zeros(len(results), TARGET)
        table["result"] = [self.runtime.address(r) for r in results]
        table["offset"] = offsets[:-1]
        table["length"] = np.minimum([r.size for r in results], np.diff(offsets))
        return table

    def _selector(
        self, work: Sequence[SegmentWork], u: Array, v: Array, thresholds: np.ndarray | None, own: Scratch
    ) -> Selector:
        if v.dtype not in (np.float32, np.float64) or u.dtype != v.dtype or u.size < v.size:
            given = f"u is {u.dtype} ({u.size}) and v is {v.dtype} ({v.size})"
            raise LayoutError(f"{given}; both must be float32, or both float64")
        geometry = self._geometry([w.length for w in work])
        return Selector(self.runtime, self._workspace, own.device, self._tables, geometry, work, u, v, thresholds)

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


def together(payloads: Sequence[np.ndarray], tables: Tables) -> tuple[np.ndarray, int]:
    """All payloads in one array, and at what distance they lie.

    That is the memory of the gathered messages, from the first payload to the end of the last one; payloads that lie
    elsewhere are copied. Only payloads that are views of one array are known to have nothing but messages between them.
    """
    first, size = payloads[0], payloads[0].size
    addresses = [p.ctypes.data for p in payloads]
    stride = addresses[1] - addresses[0] if len(payloads) > 1 else -(-size // 8) * 8
    even = all(b - a == stride for a, b in pairwise(addresses))
    if even and stride >= size and stride % 8 == 0 and len({id(_owner(p)) for p in payloads}) == 1:
        total = stride * (len(payloads) - 1) + size
        return np.lib.stride_tricks.as_strided(first, (total,), (1,), writeable=False), stride
    stride = -(-size // 8) * 8
    (whole,) = tables.lend(np.zeros(stride * len(payloads), np.uint8))
    for i, payload in enumerate(payloads):
        whole[i * stride : i * stride + size] = payload
    return whole, stride


def _owner(array: np.ndarray) -> np.ndarray:
    """The array that this one is a view of, in the end."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
