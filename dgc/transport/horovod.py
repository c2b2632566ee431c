"""What the Horovod transports of all frameworks share: everything but the two calls of Horovod itself.

P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

import abc

import numpy as np

from dgc.core.transport import Transport
from dgc.errors import TransportError
from dgc.transport.checks import check_allgather, check_allreduce, reduce_in_rank_order

SMALL_BYTES = 64 * 1024
"""Up to this total an allreduce gathers all arrays and adds them in rank order: one round as well, and exact bits."""

GATHER_BYTES = 4 * 1024 * 1024
"""A maximum of a large array gathers pieces of about this total."""


class HorovodTransportBase(Transport):
    """Collectives of Horovod, to be called by one thread at a time, any thread, in the same order on every rank.

    An ``allreduce`` gives the same bits on every rank. Small arrays, and every "max", are gathered and folded in rank
    order. Large sums are Horovod's own: Gloo's and NCCL's rings compute each sum on one rank and copy it to the others;
    MPI's algorithms do that too, or let two ranks add the same two numbers, and a+b has the bits of b+a.
    """

    name = "horovod"
    shut_down = "Horovod is shut down: stop exchanging before hvd.shutdown()"

    def __init__(self, rank: int, size: int) -> None:
        """Remember this process' place in its group."""
        self.rank = rank
        self.size = size
        self._closed = False

    @abc.abstractmethod
    def _gather(self, message: np.ndarray) -> np.ndarray:
        """Join the members' uint8 messages in rank order, as a uint8 array."""

    @abc.abstractmethod
    def _sum(self, array: np.ndarray) -> None:
        """Sum ``array`` over all members, in place."""

    @abc.abstractmethod
    def _is_running(self) -> bool:
        """Whether the library is initialised."""

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
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

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:  # noqa: D102
        self._require_open()
        check_allreduce(array, op)
        if self.size == 1 or array.size == 0:
            return
        if array.nbytes * self.size <= SMALL_BYTES:
            self._gather_and_fold(array, op)
        elif op == "max":
            # Horovod's Max drops or keeps a NaN depending on the order in which ranks are compared.
            step = max(1, GATHER_BYTES // (array.itemsize * self.size))
            for start in range(0, array.size, step):
                self._gather_and_fold(array[start : start + step], op)
        else:
            self._sum(array)

    def close(self) -> None:
        """Refuse further collectives. Horovod itself goes on."""
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
