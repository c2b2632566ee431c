"""The base class of transports over the collectives of Horovod or ``torch.distributed``.

Such a transport needs the framework's tensors. So it is defined in the framework's adapter, as a subclass with four
methods. P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np
from typing_extensions import override

from dgc.core.collectives import (
    SMALL_BYTES,
    Transport,
    check_allgather,
    check_allreduce,
    check_alltoall,
    reduce_in_rank_order,
)
from dgc.errors import TransportError

# The maximum of a large array is computed in pieces. For each piece, a rank gathers at most this many bytes.
GATHER_BYTES = 4 * 1024 * 1024


class FrameworkTransport(Transport):
    """Collectives of a framework. One thread at a time calls them, in the same order on every rank.

    An ``allreduce`` gives the same bits on every rank. Small arrays, and all arrays for a "max", are gathered and
    reduced in rank order. The framework computes large sums. The rings of Gloo and NCCL compute each sum on one
    rank and copy it to the others. So do MPI's algorithms, except that some let two ranks add the same two numbers;
    a+b has the same bits as b+a.

    Attributes:
        shut_down: the text of the error that is raised when the framework is no longer initialised.
    """

    shut_down: ClassVar[str]

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._closed = False

    @abc.abstractmethod
    def _gather(self, message: np.ndarray) -> np.ndarray:
        """Return all ranks' uint8 messages, joined in rank order."""

    @abc.abstractmethod
    def _deal(self, message: np.ndarray) -> np.ndarray:
        """Send part r of a uint8 message, (P * c,), to rank r; return the received parts, joined in rank order."""

    @abc.abstractmethod
    def _sum(self, array: np.ndarray) -> None:
        """Sum ``array`` over all ranks, in place."""

    @abc.abstractmethod
    def _is_running(self) -> bool:
        """Return whether the framework is initialised."""

    @override
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        self._require_open()
        check_allgather(message, out, self.size)
        if message.size == 0:
            return
        gathered = self._gather(message)
        if gathered.size != out.size:
            raise TransportError(
                f"the ranks gathered messages of different sizes: {gathered.size} bytes in all, expected {out.size}"
            )
        np.copyto(out, gathered.reshape(out.shape))

    @override
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        self._require_open()
        check_allreduce(array, op)
        if self.size == 1 or array.size == 0:
            return
        if array.nbytes * self.size <= SMALL_BYTES:
            self._gather_and_fold(array, op)
        elif op == "max":
            # The maximum of MPI or Gloo may drop a NaN, depending on the order in which it compares ranks.
            step = max(1, GATHER_BYTES // (array.itemsize * self.size))
            for start in range(0, array.size, step):
                self._gather_and_fold(array[start : start + step], op)
        else:
            self._sum(array)

    @override
    def alltoall(self, message: np.ndarray, out: np.ndarray) -> None:
        self._require_open()
        check_alltoall(message, out, self.size)
        if message.size == 0:
            return
        dealt = self._deal(message.reshape(-1))
        if dealt.size != out.size:
            raise TransportError(
                f"the ranks dealt messages of different sizes: {dealt.size} bytes came, expected {out.size}"
            )
        np.copyto(out, dealt.reshape(out.shape))

    @override
    def close(self) -> None:
        """Refuse further collectives. The framework itself stays initialised."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"this {self.name} transport is closed")
        if not self._is_running():
            raise TransportError(self.shut_down)

    def _gather_and_fold(self, array: np.ndarray, op: str) -> None:
        parts = np.empty((self.size, array.nbytes), np.uint8)
        self.allgather(array.view(np.uint8), parts)
        reduce_in_rank_order(parts.view(array.dtype), op, array)
