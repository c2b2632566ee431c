"""The collectives that the exchange needs, the classes of transports that offer them, and checks of their arguments.

P = number of ranks, m = message bytes. Every rank must call the same collectives in the same order.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from typing_extensions import override

from dgc.errors import TransportError


@runtime_checkable
class Collectives(Protocol):
    """The interface of an object that is passed as ``transport=``; see :class:`Transport`.

    Its ``alltoall``, if it has one, is not used: derive from :class:`Transport` for that.
    """

    rank: int
    size: int
    name: str

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """See :meth:`Transport.allgather`."""

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """See :meth:`Transport.allreduce`."""

    def close(self) -> None:
        """See :meth:`Transport.close`."""


class Transport(abc.ABC):
    """Moves messages between the ranks of a job or of a process set.

    Attributes:
        rank: this process' place in the group, 0 <= rank < size.
        size: number of ranks in the group, P.
        name: short name for statistics and errors: "local", "mpi", "horovod".
        inside: the transport within this rank's node, if each node exchanges as one rank; else None.
    """

    rank: int
    size: int
    name: str
    inside: Transport | None = None

    @abc.abstractmethod
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Copy every rank's message, (m,) uint8, into ``out``, (P, m), blocking.

        m is below 2 GiB and equal on all ranks.

        Raises:
            TransportError: the collective failed.
        """

    def gather(self, message: np.ndarray, root: int) -> np.ndarray:
        """Gather every rank's message, (m,) uint8; return (P, m) on the rank ``root`` and (0, m) on other ranks."""
        gathered = gather_rows(self, message)
        return gathered if self.rank == root else gathered[:0]

    @abc.abstractmethod
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduce (n,) float32 or float64 in place by "sum" or "max", blocking; bit-identical on every rank.

        Raises:
            TransportError: the collective failed.
        """

    def alltoall(self, message: np.ndarray, out: np.ndarray) -> None:
        """Send row r of the message, (P, c) uint8, to rank r; receive row s of ``out``, (P, c), from rank s. Blocking.

        c is equal on all ranks, and P * c is below 2 GiB. A transport may lack this method: see ``has_alltoall``.

        Raises:
            TransportError: the collective failed.
        """
        raise TransportError(f"the {self.name!r} transport has no alltoall")

    @property
    def has_alltoall(self) -> bool:
        """Whether the transport has :meth:`alltoall`; the same on every rank."""
        return type(self).alltoall is not Transport.alltoall

    @abc.abstractmethod
    def close(self) -> None:
        """Release the transport's resources. No collective may follow. A second call is allowed."""

    @property
    def whole(self) -> Transport:
        """The transport between all ranks: this one, or another one if each node exchanges as one rank."""
        return self

    def end_job(self, error: Exception) -> None:  # noqa: B027
        """End all ranks of the job, if the transport can do so. Called when ranks wait for a rank that is gone."""

    def rank_info(self) -> dict[str, int]:
        """Return this process' rank, the number of all ranks and, if nodes send as one rank, the number of nodes."""
        return {"rank": self.rank, "size": self.size}

    def label(self, rank: int) -> str:
        """Return the name of a rank of this transport, for errors."""
        return f"rank {rank}" if self.inside is None else f"node {rank}"


class Divisible(Transport):
    """A transport whose ranks can be split into groups."""

    @abc.abstractmethod
    def broadcast(self, array: np.ndarray) -> None:
        """Overwrite a contiguous array with rank 0's. Its type and size are equal on all ranks."""

    @abc.abstractmethod
    def split(self, color: int) -> Divisible:
        """Return a transport between the ranks that give the same color, without changing their order. Collective."""

    def nodes(self) -> list[int] | None:
        """Return, for each rank, the lowest rank on its machine; None if the machines are not known. Collective."""
        return None


class _Wrapped(Transport):
    """A transport that calls a user's object."""

    def __init__(self, given: Collectives) -> None:
        self.rank, self.size, self.name = given.rank, given.size, given.name
        self.given = given

    @override
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        self.given.allgather(message, out)

    @override
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        self.given.allreduce(array, op)

    @override
    def close(self) -> None:
        self.given.close()


def as_transport(given: Collectives) -> Transport:
    """Return the object itself if it derives from :class:`Transport`, else a transport that calls it."""
    return given if isinstance(given, Transport) else _Wrapped(given)


# Up to this total size, an allreduce gathers all arrays and adds them in rank order. Above it, the ranks of an MPI
# transport first tell each other that they have reached the collective.
SMALL_BYTES = 64 * 1024

BYTE_LIMIT = 2**31 - 1  # largest buffer of a collective: MPI counts elements in a signed 32-bit integer

# np.maximum keeps every NaN. MPI_MAX may drop one, depending on the order of the ranks.
REDUCTIONS = {"sum": np.add, "max": np.maximum}


def check_allgather(message: np.ndarray, out: np.ndarray, size: int) -> None:
    """Require a message, (m,), and a writeable ``out``, (size, m), both contiguous uint8."""
    if message.dtype != np.uint8 or message.ndim != 1 or not message.flags.c_contiguous:
        raise TransportError(f"allgather takes a contiguous 1-D uint8 message, got {_describe(message)}")
    if message.nbytes > BYTE_LIMIT:
        raise TransportError(f"a message must stay below 2 GiB, got {message.nbytes} bytes: use smaller buckets")
    fits = out.dtype == np.uint8 and out.shape == (size, message.size) and out.flags.c_contiguous
    if not fits or not out.flags.writeable:
        raise TransportError(
            f"allgather of {message.size} bytes over {size} ranks writes a contiguous uint8 array of shape "
            f"({size}, {message.size}), got {_describe(out)}"
        )


def check_alltoall(message: np.ndarray, out: np.ndarray, size: int) -> None:
    """Require a message and a writeable ``out``, both contiguous (size, c) uint8."""
    fits = all(a.dtype == np.uint8 and a.ndim == 2 and len(a) == size and a.flags.c_contiguous for a in (message, out))
    if not fits or message.shape != out.shape or not out.flags.writeable:
        raise TransportError(
            f"alltoall over {size} ranks takes two contiguous uint8 arrays of shape ({size}, c), the second one "
            f"writeable, got {_describe(message)} and {_describe(out)}"
        )
    if message.nbytes > BYTE_LIMIT:
        raise TransportError(f"a message must stay below 2 GiB, got {message.nbytes} bytes: use smaller buckets")


def check_allreduce(array: np.ndarray, op: str) -> None:
    """Require a contiguous, writeable array, (n,) float32 or float64, and the op "sum" or "max"."""
    if op not in REDUCTIONS:
        raise TransportError(f"allreduce knows {sorted(REDUCTIONS)}, got op={op!r}")
    if array.dtype not in (np.float32, np.float64) or array.ndim != 1:
        raise TransportError(f"allreduce takes a 1-D float32 or float64 array, got {_describe(array)}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise TransportError(f"allreduce works in place on a contiguous, writeable array, got {_describe(array)}")
    if array.nbytes > BYTE_LIMIT:
        raise TransportError(f"an array must stay below 2 GiB, got {array.nbytes} bytes: use smaller buckets")


def reduce_in_rank_order(parts: Sequence[np.ndarray] | np.ndarray, op: str, out: np.ndarray) -> None:
    """Reduce the ranks' arrays from rank 0 upwards: ``((p0 + p1) + p2) + ...``.

    The order is fixed, so equal inputs give equal bits on every rank and every transport that uses this function.
    ``parts`` are P arrays of shape (n,), or one array (P, n); ``out``, (n,), may be ``parts[0]`` itself.
    """
    reduction = REDUCTIONS[op]
    if out is not parts[0]:
        np.copyto(out, parts[0])
    # The exchange finds and refuses gradients that overflow, so a warning from NumPy would add nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts[1:]:
            reduction(out, part, out=out)


def _describe(array: np.ndarray) -> str:
    traits = "" if array.flags.c_contiguous else ", not contiguous"
    traits += "" if array.flags.writeable else ", read-only"
    return f"{array.dtype.name} of shape {array.shape}{traits}"


LENGTH_BYTES = 8  # of the number that a rank sends before a text: the text's length


def gather_values(transport: Transport, value: object) -> list[Any]:
    """Return every rank's small value, of a type that JSON knows, in rank order. Collective."""
    text = json.dumps(value).encode()
    lengths = gather_rows(transport, np.frombuffer(len(text).to_bytes(LENGTH_BYTES, "little"), np.uint8))
    return [json.loads(each) for each in gather_texts(transport, text, lengths.view("<i8")[:, 0].tolist())]


def gather_texts(transport: Transport, text: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Return every rank's text, given the lengths of all texts. Collective."""
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [row[:n].tobytes() for row, n in zip(gather_rows(transport, padded), lengths, strict=True)]


def gather_rows(transport: Transport, message: np.ndarray) -> np.ndarray:
    """Gather this rank's message, (m,) uint8, and return the messages of all ranks, (P, m). Collective."""
    out = np.empty((transport.size, message.size), np.uint8)
    transport.allgather(np.ascontiguousarray(message), out)
    return out
