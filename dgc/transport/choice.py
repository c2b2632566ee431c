"""Which transport a Horovod job uses, and what the transports of Horovod's own collectives share in all frameworks.

P = number of ranks, m = message bytes, n = elements.
"""

from __future__ import annotations

import abc
import functools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from dgc.core.transport import SMALL_BYTES, Transport, check_allgather, check_allreduce, reduce_in_rank_order
from dgc.errors import ConfigError, TransportError
from dgc.transport.agreement import error_of, report
from dgc.transport.mpi import MPITransport, import_mpi, why_unusable

CHOICES = ("auto", "mpi", "horovod")

_QUESTION = "transport.choice"


class ProcessSet(Protocol):
    """Horovod's, as far as it is used here; its numbers are None for this process where it is not one of the set."""

    process_set_id: int | None
    ranks: Any

    def included(self) -> bool | None: ...  # noqa: D102

    def rank(self) -> int: ...  # noqa: D102

    def size(self) -> int: ...  # noqa: D102


Gather = Callable[[Any, str], list[Any]]
"""Asks all ranks for a small value: (value, question) -> list in rank order."""


def choose_transport(choice: str, hvd: ModuleType, gather: Gather, make_horovod: Callable[[], Transport]) -> Transport:
    """Make the transport for a group of ranks. Collective.

    All ranks tell each other what they asked for and whether they can use MPI, and all decide alike: a rank without
    mpi4py never waits on another channel than its peers.

    Args:
        choice: "mpi": mpi4py on the MPI that Horovod runs on. "horovod": Horovod's own collectives. "auto": mpi where
            every rank can use it, else horovod, with one warning if Horovod itself does run on MPI.
        hvd: the framework's Horovod module, initialised.
        gather: asks all ranks of the group.
        make_horovod: makes the framework's Horovod transport for the group.
    """
    # Only who may need MPI looks for it: importing mpi4py is not free of side effects.
    refusal = None if choice not in ("auto", "mpi") else _why_not_mpi(hvd)
    answers = _ask({"rank": hvd.rank(), "choice": choice, "refusal": refusal}, gather)
    if choice == "horovod":
        return make_horovod()
    refusal = next((f"rank {answer['rank']}: {answer['refusal']}" for answer in answers if answer["refusal"]), None)
    if refusal is None:
        ranks = None if len(answers) == hvd.size() else [answer["rank"] for answer in answers]
        return MPITransport(expect_rank=hvd.rank(), expect_size=hvd.size(), ranks=ranks)
    if choice == "mpi":
        raise TransportError(f'transport="mpi" cannot be used. {refusal}. transport="auto" or "horovod" works here.')
    # Under Gloo Horovod is simply the right transport; under MPI somebody loses speed without knowing.
    if hvd.mpi_enabled() and answers[0]["rank"] == hvd.rank():
        _warn_once(f"gradients are sent through Horovod's own collectives instead of mpi4py's: {refusal}")
    return make_horovod()


def require_no_choice(rank: int, gather: Gather) -> None:
    """Require, on a rank without a compressor, that no other rank makes a transport. Collective."""
    _ask({"rank": rank, "choice": None, "refusal": None}, gather)


def tell_no_choice(error: Exception, rank: int, gather: Gather) -> None:
    """Tell the other ranks, which make a transport or require that there is none, why this one fails. Collective."""
    own = {"rank": rank, "choice": None, "refusal": None}
    report(error, lambda described: gather({**own, "error": described}, _QUESTION))


def _ask(own: dict[str, Any], gather: Gather) -> list[dict[str, Any]]:
    """All ranks' answers, which are known and equal choices."""
    try:
        answers = gather(own, _QUESTION)
    except TransportError as error:
        raise TransportError(f"{error}; build a compressor on every rank, or on none") from error
    for answer in answers:
        if "error" in answer:
            raise error_of(answer["rank"], *answer["error"])
    without = [answer["rank"] for answer in answers if answer["choice"] is None]
    others = [answer["rank"] for answer in answers if answer["choice"] is not None]
    if without and others:
        raise ConfigError(
            f"rank {without[0]} has no compressor of dgc's, and rank {others[0]} has one; give every rank the same "
            "compression="
        )
    if others:
        _require_known_choice(answers)
    return answers


def _require_known_choice(answers: list[dict[str, Any]]) -> None:
    choices = {answer["choice"]: answer["rank"] for answer in reversed(answers)}
    for choice, rank in choices.items():
        if choice not in CHOICES:
            allowed = ", ".join(CHOICES)
            raise ConfigError(f"transport must be one of {allowed} or a Transport, rank {rank} got {choice!r}")
    if len(choices) > 1:
        listed = ", ".join(f"{choice!r} on rank {rank}" for choice, rank in sorted(choices.items(), key=lambda c: c[1]))
        raise ConfigError(f"the ranks ask for different transports: {listed}. Give every rank the same transport=...")


def _why_not_mpi(hvd: ModuleType) -> str | None:
    """Why this rank cannot use mpi4py beside Horovod, or None. Local: no communication."""
    if not hvd.mpi_built():
        return "Horovod was built without MPI"
    if not hvd.mpi_enabled():
        # Importing mpi4py.MPI here would start an MPI of one rank, or abort the process where MPI cannot start alone.
        return "Horovod does not run on MPI (horovodrun --gloo), so mpi4py would see a world of one"
    if not hvd.mpi_threads_supported():
        return (
            "Horovod's MPI has no MPI_THREAD_MULTIPLE: unset HOROVOD_MPI_THREADS_DISABLE and mpi4py.rc.thread_level, "
            "or use an MPI library built with thread support"
        )
    try:
        mpi = _import_running_mpi()
    except TransportError as error:
        return str(error)
    if not mpi.Is_initialized():
        return (
            "mpi4py uses another MPI library than Horovod: reinstall one of them for the same MPI "
            "(pip install --no-binary mpi4py mpi4py)"
        )
    return why_unusable(mpi, mpi.COMM_WORLD, hvd.rank(), hvd.size())


def _import_running_mpi() -> Any:
    """Import ``mpi4py.MPI`` without letting it start an MPI of its own, since Horovod's is running already."""
    if "mpi4py.MPI" in sys.modules:
        return import_mpi()
    try:
        import mpi4py
    except ImportError:
        return import_mpi()
    before = mpi4py.rc.initialize
    mpi4py.rc.initialize = False
    try:
        return import_mpi()
    finally:
        mpi4py.rc.initialize = before


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


# -- Horovod's own collectives -----------------------------------------------------------------------------------

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
