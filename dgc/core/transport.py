"""What the exchange needs from whatever moves its bytes: four members and two collectives; all else has a default.

P = number of ranks, m = message bytes. Every rank must call the same collectives in the same order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Collectives(Protocol):
    """The least that an object given as ``transport=`` must have; :class:`Transport` says what each member does."""

    rank: int
    size: int
    name: str

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None: ...  # noqa: D102

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Transport(abc.ABC):
    """Moves messages between the ranks of one job (or of one process set)."""

    rank: int
    """This process' place in the group, 0 <= rank < size."""
    size: int
    """Number of ranks in the group, P."""
    name: str
    """Short name for statistics and errors: "local", "mpi", "horovod"."""
    inside: Transport | None = None
    """Where each node exchanges as one rank: the transport within this rank's node."""

    @abc.abstractmethod
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Copy every rank's message, (m,) uint8, into ``out``, (P, m), blocking; m below 2 GiB, the same everywhere.

        Raises:
            TransportError: the collective failed.
        """

    @abc.abstractmethod
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduce (n,) float32 or float64 in place by "sum" or "max", blocking; bit-identical on every rank.

        Raises:
            TransportError: the collective failed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the transport holds. Further collectives are errors. Calling it twice is fine."""

    @property
    def whole(self) -> Transport:
        """The transport among all ranks, where each node exchanges as one rank; else this one."""
        return self

    @property
    def divisible(self) -> Divisible | None:
        """This transport, or the one that it wraps, where its ranks can be split into groups; else None."""
        return None

    def busy(self) -> AbstractContextManager[None]:
        """While this rank works outside a collective for any length of time: the others do not give it up."""
        return nullcontext()

    def end_job(self, error: Exception) -> None:  # noqa: B027
        """End all ranks with this one, where the transport can: its caller waits for a rank that is gone."""

    def rank_info(self) -> dict[str, int]:
        """This process' rank among all ranks, their number and, where nodes send as one, the number of nodes."""
        return {"rank": self.rank, "size": self.size}

    def label(self, rank: int) -> str:
        """How an error names a rank of this transport."""
        return f"rank {rank}" if self.inside is None else f"node {rank}"


class Divisible(Transport):
    """A transport whose ranks can be split into groups."""

    on_long_wait: Callable[[], None] | None = None
    """Called now and then while a collective does not end, if set."""

    @property
    def divisible(self) -> Divisible:  # noqa: D102
        return self

    @abc.abstractmethod
    def broadcast(self, array: np.ndarray) -> None:
        """Overwrite ``array``, contiguous and of the same type and size on every rank, with that of rank 0."""

    @abc.abstractmethod
    def split(self, color: int) -> Divisible:
        """A transport among the ranks that give the same color, in the same order. Collective."""

    def nodes(self) -> list[int] | None:
        """For each rank the lowest one that shares its memory; None where that is not known. Collective."""
        return None

    def tell_busy(self) -> None:
        """Send once to ranks that wait for this one that it will come: it waits for another rank itself."""


class _Wrapped(Transport):
    """A user's object with no more than the members of :class:`Collectives`."""

    def __init__(self, given: Collectives) -> None:
        self.rank, self.size, self.name = given.rank, given.size, given.name
        self.given = given

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        self.given.allgather(message, out)

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        self.given.allreduce(array, op)

    def close(self) -> None:
        self.given.close()


def as_transport(given: Collectives) -> Transport:
    """The object itself if it derives from :class:`Transport`, else one that calls it."""
    return given if isinstance(given, Transport) else _Wrapped(given)
