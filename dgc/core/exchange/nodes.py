"""Ranks that send as one: their gradients are added up within their node before they are compressed.

Then every rank of a node holds the same sum and makes the same message, of which one copy travels. For the compressor a
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
    """Adds up gradients within this rank's node, in host memory, and lets its ranks fail together."""

    def __init__(self, config: DGCConfig, kernels: Any, transport: Transport) -> None:
        """Take the kernels that read the gradients, and the transport among nodes. Local: no communication."""
        inside, place = transport.inside, transport.rank_info()
        assert inside is not None, "the transport connects nodes"
        self._inside = inside
        self._first = place["rank"] - inside.rank
        self._kernels = kernels
        self._on_device = kernels.on_device
        self._memory = kernels.memory
        # With an average, the nodes' mean is the mean of all ranks, however many ranks each node has.
        self._factor = place["nodes"] / place["size"] if config.op == "average" else 1.0
        self._sums: dict[int, np.ndarray] = {}
        self._vectors: dict[int, Any] = {}  # the same on a device

    def agree(self, own: Announced | None, step: Step, buckets: Sequence[Bucket]) -> Announced | None:
        """Return the error of the node's first rank that has announced one, and its parameter. Collective.

        A parameter of these buckets is absent from now on only if no rank of the node has a gradient of it.
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
        """Copy this rank's gradients of a complete bucket to host memory. Local: no communication."""
        gradients = [item.gradient for item in step.submissions.of(bucket.segments)]
        host = self._sum_of(bucket)
        if self._on_device:  # now, while a rank without memory can still say so
            self._vector_of(bucket)
        for segment, gradient in zip(bucket.segments, gradients, strict=True):
            host[segment.slice] = self._from(gradient)

    def add_up(self, step: Step, bucket: Bucket) -> None:
        """Replace this rank's gradients, which were collected, by the node's sum. Collective."""
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
            self._sums[bucket.index].fill(0.0)  # between tensors
        return self._sums[bucket.index]

    def _vector_of(self, bucket: Bucket) -> Any:
        if bucket.index not in self._vectors:
            self._vectors[bucket.index] = self._memory.zeros(bucket.size, bucket.dtype)
        return self._vectors[bucket.index]

    def _from(self, gradient: Any) -> np.ndarray:
        host: np.ndarray = self._memory.to_host(gradient) if self._on_device else gradient
        # Bfloat16 arrives as its bits: the upper half of a float32.
        return (host.astype(np.uint32) << 16).view(np.float32) if host.dtype == np.uint16 else host
