"""What the exchange needs from whatever moves its bytes: four members and two collectives; all else has a default.

P = number of ranks, m = message bytes. Every rank must call the same collectives in the same order.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dgc.errors import TransportError


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

    @abc.abstractmethod
    def broadcast(self, array: np.ndarray) -> None:
        """Overwrite ``array``, contiguous and of the same type and size on every rank, with that of rank 0."""

    @abc.abstractmethod
    def split(self, color: int) -> Divisible:
        """A transport among the ranks that give the same color, in the same order. Collective."""

    def nodes(self) -> list[int] | None:
        """For each rank the lowest one that shares its memory; None where that is not known. Collective."""
        return None


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


# Up to this total a collective is one round: an allreduce gathers all arrays and adds them in rank order. Above it, the
# ranks of an MPI transport first tell each other that they have come.
SMALL_BYTES = 64 * 1024

BYTE_LIMIT = 2**31 - 1
"""Largest buffer of one collective: MPI counts elements in a signed 32-bit integer."""

REDUCTIONS = {"sum": np.add, "max": np.maximum}
"""Reductions by name. ``np.maximum`` keeps a NaN wherever it comes from; MPI_MAX lets the order of ranks decide."""


def check_allgather(message: np.ndarray, out: np.ndarray, size: int) -> None:
    """Require (m,) and (P, m) uint8, contiguous, ``out`` writeable, for an allgather over ``size`` ranks."""
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


def check_allreduce(array: np.ndarray, op: str) -> None:
    """Require (n,) float32 or float64, contiguous and writeable, and the op "sum" or "max"."""
    if op not in REDUCTIONS:
        raise TransportError(f"allreduce knows {sorted(REDUCTIONS)}, got op={op!r}")
    if array.dtype not in (np.float32, np.float64) or array.ndim != 1:
        raise TransportError(f"allreduce takes a 1-D float32 or float64 array, got {_describe(array)}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise TransportError(f"allreduce works in place on a contiguous, writeable array, got {_describe(array)}")
    if array.nbytes > BYTE_LIMIT:
        raise TransportError(f"an array must stay below 2 GiB, got {array.nbytes} bytes: use smaller buckets")


def reduce_in_rank_order(parts: Sequence[np.ndarray] | np.ndarray, op: str, out: np.ndarray) -> None:
    """Fold the ranks' arrays from rank 0 upwards, ``((p0 + p1) + p2) + ...``.

    The order is fixed, so equal inputs give equal bits on every rank, on every transport that uses this function.
    ``parts`` are P arrays of shape (n,), or one of (P, n); ``out``, (n,), may be ``parts[0]`` itself.
    """
    reduction = REDUCTIONS[op]
    if out is not parts[0]:
        np.copyto(out, parts[0])
    # Overflown gradients are found and refused by the exchange; a warning on the console would add nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts[1:]:
            reduction(out, part, out=out)


def _describe(array: np.ndarray) -> str:
    traits = "" if array.flags.c_contiguous else ", not contiguous"
    traits += "" if array.flags.writeable else ", read-only"
    return f"{array.dtype.name} of shape {array.shape}{traits}"


LENGTH_BYTES = 8


def gather_values(transport: Transport, value: object) -> list[Any]:
    """Every rank's small value, which JSON must know, in rank order. Collective."""
    text = json.dumps(value).encode()
    lengths = gather_rows(transport, np.frombuffer(len(text).to_bytes(LENGTH_BYTES, "little"), np.uint8))
    return [json.loads(each) for each in gather_texts(transport, text, lengths.view("<i8")[:, 0].tolist())]


def gather_texts(transport: Transport, text: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Every rank's text, of a length that is known. Collective."""
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [row[:n].tobytes() for row, n in zip(gather_rows(transport, padded), lengths, strict=True)]


def gather_rows(transport: Transport, message: np.ndarray) -> np.ndarray:
    """Every rank's message, (m,) uint8, as (P, m). Collective."""
    out = np.empty((transport.size, message.size), np.uint8)
    transport.allgather(np.ascontiguousarray(message), out)
    return out
