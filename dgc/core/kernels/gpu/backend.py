"""The device backend: the protocol of ``base`` on arrays of a device; see ``buckets`` for whole buckets.

Letters: n elements of a bucket's flat space, S segments, k entries. u, v, gradients, parameters and results are device
arrays; positions, values and means cross as NumPy arrays. What has to hand numbers to the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.kernels.base import Array, Kernels, MomentumRule, SegmentWork, Selection, check_positions
from dgc.core.kernels.gpu.buckets import BLOCKS
from dgc.core.kernels.gpu.codes import CodedTensor, CodeKernels
from dgc.core.kernels.gpu.cuda.source import THREADS
from dgc.core.kernels.gpu.memory import DeviceMemory, Runtime
from dgc.core.kernels.gpu.tables import SUMMARY, DenseTensor
from dgc.errors import LayoutError


class DeviceKernels(CodeKernels, Kernels):
    """The protocol :class:`dgc.core.kernels.base.Kernels` on a device, and the operations of whole buckets.

    Safe to call from several threads; they take turns.
    """

    on_device = True
    overlaps = True

    def __init__(self, runtime: Runtime) -> None:
        """Take a runtime over; nothing is compiled yet."""
        super().__init__(runtime)
        self.name = runtime.name
        self.memory = DeviceMemory(runtime, self.sums_of_squares)

    def describe(self) -> str:
        """One line for a log: what runs where."""
        return f"{self.name} kernels"

    def adopt_thread(self) -> None:
        """Say that this thread belongs to the exchange; see :class:`~dgc.core.kernels.gpu.memory.Runtime`."""
        self.runtime.adopt_thread()

    def warm_up(self, dtype: str = "float32") -> None:
        """Run every kernel on a small bucket: they are compiled and loaded, and memory pools are filled."""
        n = 8192
        kind = np.dtype(dtype)
        u, v, g, r = (self.runtime.zeros(n, kind) for _ in range(4))
        self.memory.copy_in(g, np.ones(n, kind))
        thresholds = self.new_thresholds(1)
        vector = self.runtime.host_array(n, kind)
        # The first pass knows no threshold, the second one does.
        for _ in range(2):
            work = [SegmentWork(g, None, 0, n, 8, momentum=0.9)]
            chosen = self.compress(work, u, v, thresholds, [DenseTensor(gradient=g, vector=0)], vector)
        bounds = np.array([0, n])
        self.receive([r], bounds, [(chosen.positions, chosen.values)], 1.0)
        self.write([DenseTensor(result=r, vector=0, momentum=0.9)], vector, u)
        self.exceeds([DenseTensor(result=r, limit=1.0)], vector, u)()
        self.sums_of_squares([g])
        self.accumulate(work, u, v)
        self.mask(u, v, chosen.positions, chosen.values, masking=True)
        self._warm_up_codes(v, r)
        self.memory.fill(r, np.nan)
        self.wait()

    def _warm_up_codes(self, v: Array, result: Array) -> None:
        """Run what the compressors of few bits need."""
        n = 4096
        common = {"length": n, "group": n, "columns": 64, "scales": 0}
        payload = self.runtime.host_array(4 * n, np.uint8)
        for tensor, norm in (
            (CodedTensor(kind="span", bits=4, levels=15, inner=1, codes=4, bytes=n // 2, scale=1.0, **common), ""),
            (CodedTensor(kind="signed", bits=4, levels=7, inner=1, codes=4, bytes=n // 2, **common), "l2"),
            (CodedTensor(kind="sign", bits=1, levels=1, inner=1, codes=512, bytes=n // 8, **common), ""),
            (CodedTensor(kind="sign", bits=1, levels=1, inner=64, codes=512, bytes=n // 8, **common), ""),
        ):
            self.moments(v, [tensor])
            self.write_codes(v, [tensor], payload, norm)
            self.add_codes([result[:n]], [tensor], [payload], 1.0)

    def sums_of_squares(self, gradients: Sequence[Array]) -> np.ndarray:
        """See :class:`~dgc.core.kernels.base.Kernels`. Waits."""
        with self.lock:
            tensors = [DenseTensor(gradient=g) for g in gradients]
            geometry, _, _ = self._geometry([t.length for t in tensors])
            partial = self._workspace.get("partial", np.float64, geometry.tiles)
            host = self._scratch.host("partial", 8 * geometry.tiles).view(np.float64)
            self._over_tensors("squares", 32, tensors, partial)
            if geometry.tiles:
                self.runtime.download(host, partial)
                self.wait()
            ends = np.cumsum(geometry.tiles_of)
            return np.array([host[e - c : e].sum() for e, c in zip(ends, geometry.tiles_of, strict=True)], np.float64)

    def gather(self, gradients: Sequence[Array], offsets: Sequence[int], vector: Array) -> None:
        """Copy gradients of any float types to ``offsets`` of a device vector, (n,). Does not wait.

        Raises:
            LayoutError: one is not what a kernel may read.
        """
        bits = 8 * np.dtype(vector.dtype).itemsize
        with self.lock:
            tensors = [DenseTensor(gradient=g, vector=at) for g, at in zip(gradients, offsets, strict=True)]
            met = self._scratch.host("gathered", SUMMARY.itemsize)  # not read
            self._over_tensors("pack", bits, tensors, vector, np.int64(vector.size), met)

    def scale(self, vector: Array, factor: float) -> None:
        """Multiply a device vector, (n,), by a factor of its type. Does not wait."""
        with self.lock:
            tensor = DenseTensor(result=vector, vector=0, scale=factor)
            self._over_tensors("update", 8 * np.dtype(vector.dtype).itemsize, [tensor], vector, vector)

    def accumulate(self, work: Sequence[SegmentWork], u: Array, v: Array) -> bool:
        """See :class:`~dgc.core.kernels.base.Kernels`. Waits."""
        with self.lock:
            selector = self._selector(work, u, v, None, self._scratch)
            selector.start()
            result = self._scratch.host("result", selector.result_bytes)
            selector.download(result)
            self.wait()
            selector.finish(result)
            return selector.nonfinite

    def accumulate_and_select(
        self, work: Sequence[SegmentWork], u: Array, v: Array, thresholds: np.ndarray
    ) -> Selection:
        """See :class:`~dgc.core.kernels.base.Kernels`; the selection is on the host. Waits."""
        return self.begin(work, u, v, thresholds).finish()

    def mask(self, u: Array, v: Array, positions: np.ndarray, decoded: np.ndarray, *, masking: bool) -> None:
        """See :class:`~dgc.core.kernels.base.Kernels`. Does not wait."""
        k = positions.size
        if decoded.shape != (k,):
            raise LayoutError(f"{decoded.size} decoded values were given for {k} positions")
        check_positions(positions, min(u.size, v.size))
        if k:
            with self.lock:
                places, values = self._tables.send(positions, decoded.astype(v.dtype, copy=False))
                self._over_entries("mask", u, k, u, v, places, values, np.int64(k), np.int32(masking))

    def dense_update(
        self, result: Array, mean: np.ndarray, u: Array, parameter: Array | None, rule: MomentumRule
    ) -> None:
        """See :class:`~dgc.core.kernels.base.Kernels`; ``mean`` is on the host. Does not wait."""
        tensor = DenseTensor(
            result=result, parameter=parameter if rule.weight_decay else None, u=0, vector=0, momentum=rule.momentum,
            nesterov=rule.nesterov, weight_decay=rule.weight_decay, scale=rule.scale,
        )  # fmt: skip
        with self.lock:
            (means,) = self._tables.send(mean)
            self._over_tensors("update", 8 * mean.dtype.itemsize, [tensor], means, u)

    def _over_entries(self, name: str, state: Array, k: int, *arguments: object) -> None:
        """Launch a kernel that walks over k entries of a state of ``state``'s type."""
        if k:
            self._launch(name, 8 * np.dtype(state.dtype).itemsize, min(BLOCKS, -(-k // THREADS)), *arguments)
