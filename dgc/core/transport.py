"""What the exchange needs from whatever moves its bytes: four members and two collectives.

P = number of ranks, m = message bytes. Every rank must call the same collectives in the same order.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Transport(Protocol):
    """Moves messages between the ranks of one job (or of one process set)."""

    rank: int
    """This process' place in the group, 0 <= rank < size."""
    size: int
    """Number of ranks in the group, P."""
    name: str
    """Short name for statistics and errors: "local", "mpi", "horovod"."""

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Copy every rank's message into ``out``, blocking.

        Args:
            message: (m,) uint8, contiguous, the same m on every rank (below 2 GiB).
            out: (P, m) uint8, contiguous; row r receives rank r's message.

        Raises:
            TransportError: the collective failed.
        """
        ...

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduce in place over all ranks, blocking; bit-identical on every rank.

        Args:
            array: (n,) float32 or float64, contiguous, the same n on every rank.
            op: "sum" or "max".

        Raises:
            TransportError: the collective failed.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds. Further collectives are errors. Calling it twice is fine."""
        ...


def group_of(transport: Transport) -> Transport | None:
    """The transport within this rank's group, where groups of ranks exchange as one rank each; None where ranks do."""
    return getattr(transport, "inside", None)


def whole_of(transport: Transport) -> Transport:
    """The transport among all ranks."""
    return getattr(transport, "whole", transport)


def place_of(transport: Transport) -> dict[str, int]:
    """Whose state this is: this process' rank among all, their number, and the number of groups where there are any."""
    whole = whole_of(transport)
    place = {"rank": whole.rank, "size": whole.size}
    return place if whole is transport else {**place, "nodes": transport.size}


def called(transport: Transport, rank: int) -> str:
    """What a user reads of a place in the transport's group: "rank 3", or the node whose ranks send as one."""
    return f"rank {rank}" if group_of(transport) is None else f"node {rank}"
