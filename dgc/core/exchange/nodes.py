"""Nodes whose ranks send as one: the ranks add up their gradients within the node before they compress.

Then every rank of a node has the same sum and makes the same message, and one copy of it is sent. For the compressor a
node is a rank: P is the number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc.core.collectives import Transport, gather_rows, gather_values
from dgc.core.config import DGCConfig
from dgc.core.exchange.step import Step
from dgc.core.layout import Bucket
from dgc.core.message import ERROR_CLASSES, error_code
from dgc.errors import DGCError

Announced = tuple[DGCError, int | None]


class NodeSums:
    """Adds up gradients within this rank's node, in host memory, and shares errors between the node's ranks."""

    def __init__(self, config: DGCConfig, kernels: Any, transport: Transport) -> None:
        """``kernels`` read the gradients; ``transport`` connects the nodes."""
        inside, place = transport.inside, transport.rank_info()
        assert inside is not None, "the transport connects nodes"
        self._inside = inside
        self._first = place["rank"] - inside.rank
        self._kernels = kernels
        self._on_device = kernels.on_device
        self._memory = kernels.memory
        # With an average, this factor makes the nodes' mean the mean of all ranks, even if nodes differ in size.
        self._factor = place["nodes"] / place["size"] if config.op == "average" else 1.0
        self._sums: dict[int, np.ndarray] = {}
        self._vectors: dict[int, Any] = {}  # the same on a device

    def agree(self, own: Announced | None, step: Step, buckets: Sequence[Bucket]) -> Announced | None:
        """Return the error that the node's first failed rank has announced, and its parameter; or None. Collective.

        Afterwards a parameter of these buckets counts as absent only if no rank of the node has its gradient.
        """
        absent = step.submissions.absent
        places = [s.parameter for bucket in buckets for s in bucket.segments]
        mine = np.array([own is not None, *(p in absent for p in places)], np.uint8)
        flags = gather_rows(self._inside, mine)
        absent.difference_update(p for p, has_none in zip(places, flags[:, 1:].T, strict=True) if not has_none.all())
        if not flags[:, 0].any():
            return None
        told = gather_values(self._inside, None if own is None else (error_code(own[0]), str(own[0]), own[1]))
        first = int(np.flatnonzero(flags[:, 0])[0])
        code, text, concerned = told[first]
        failure = ERROR_CLASSES[code](f"rank {self._first + first}: {text}")
        if own is not None and first == self._inside.rank:
            failure.__cause__ = own[0]
        return failure, concerned

    def collect(self, step: Step, bucket: Bucket) -> None:
        """Copy this rank's gradients of a complete bucket to host memory. Not collective."""
        gradients = [item.gradient for item in step.submissions.of(bucket.segments)]
        host = self._sum_of(bucket)
        if self._on_device:  # allocate here, where a rank without memory can still report its error
            self._vector_of(bucket)
        for segment, gradient in zip(bucket.segments, gradients, strict=True):
            host[segment.slice] = self._from(gradient)

    def add_up(self, step: Step, bucket: Bucket) -> None:
        """Replace this rank's collected gradients by the node's sum. Collective."""
        summed: Any = self._sum_of(bucket)
        self._inside.allreduce(summed, "sum")
        if self._factor != 1.0:
            summed *= self._factor
        if self._on_device:
            vector = self._vector_of(bucket)
            self._memory.copy_in(vector, summed)
            summed = vector
        for segment, item in zip(bucket.segments, step.submissions.of(bucket.segments), strict=True):
            item.gradient = summed[segment.slice]

    def _sum_of(self, bucket: Bucket) -> np.ndarray:
        if bucket.index not in self._sums:
            self._sums[bucket.index] = self._memory.host_array(bucket.size, bucket.dtype)
            self._sums[bucket.index].fill(0.0)  # the padding between tensors stays 0
        return self._sums[bucket.index]

    def _vector_of(self, bucket: Bucket) -> Any:
        if bucket.index not in self._vectors:
            self._vectors[bucket.index] = self._memory.zeros(bucket.size, bucket.dtype)
        return self._vectors[bucket.index]

    def _from(self, gradient: Any) -> np.ndarray:
        host: np.ndarray = self._memory.to_host(gradient) if self._on_device else gradient
        # bfloat16 arrives as its bits, which are the upper half of a float32.
        return (host.astype(np.uint32) << 16).view(np.float32) if host.dtype == np.uint16 else host
