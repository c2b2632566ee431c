"""Which transport a job uses: the one that the user names, or the best that all ranks can use. For any framework."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from dgc.core.transport import Transport
from dgc.errors import ConfigError, TransportError
from dgc.transport.mpi import MPITransport, import_mpi, why_unusable

CHOICES = ("auto", "mpi", "horovod")


class ProcessSet(Protocol):
    """Horovod's, as far as it is used here; its numbers are None for this process where it is not one of the set."""

    process_set_id: int | None

    def included(self) -> bool | None: ...  # noqa: D102

    def rank(self) -> int: ...  # noqa: D102

    def size(self) -> int: ...  # noqa: D102


GatherValues = Callable[[Any, str, ProcessSet], list[Any]]


def choose_transport(
    choice: str,
    hvd: ModuleType,
    members: ProcessSet,
    gather_values: GatherValues,
    make_horovod: Callable[[ProcessSet], Transport],
) -> Transport:
    """Make the transport for a group of ranks. Collective over ``members``.

    All ranks tell each other what they asked for and whether they can use MPI, and all decide alike: a rank without
    mpi4py never waits on another channel than its peers.

    Args:
        choice: "mpi": mpi4py on the MPI that Horovod runs on. "horovod": Horovod's own collectives. "auto": mpi where
            every rank can use it, else horovod, with one warning if Horovod itself does run on MPI.
        hvd: the framework's Horovod module, initialised.
        members: the process set, this rank in it.
        gather_values: asks all members for a small value: (value, question, members) -> list in rank order.
        make_horovod: makes the framework's Horovod transport for ``members``.

    Raises:
        ConfigError: unknown or differing choices.
        TransportError: "mpi" was asked for and some rank cannot use it.
    """
    # Only who may need MPI looks for it: importing mpi4py is not free of side effects.
    refusal = None if choice not in ("auto", "mpi") else _why_not_mpi(hvd)
    answers = _ask({"rank": hvd.rank(), "choice": choice, "refusal": refusal}, members, gather_values)
    if choice == "horovod":
        return make_horovod(members)
    refusal = next((f"rank {answer['rank']}: {answer['refusal']}" for answer in answers if answer["refusal"]), None)
    if refusal is None:
        ranks = None if len(answers) == hvd.size() else [answer["rank"] for answer in answers]
        return MPITransport(expect_rank=hvd.rank(), expect_size=hvd.size(), ranks=ranks)
    if choice == "mpi":
        raise TransportError(f'transport="mpi" cannot be used. {refusal}. transport="auto" or "horovod" works here.')
    # Under Gloo Horovod is simply the right transport; under MPI somebody loses speed without knowing.
    if hvd.mpi_enabled() and members.rank() == 0:
        _warn_once(f"gradients are sent through Horovod's own collectives instead of mpi4py's: {refusal}")
    return make_horovod(members)


def require_no_choice(rank: int, members: ProcessSet, gather_values: GatherValues) -> None:
    """Require, on a rank without a compressor, that no other rank makes a transport. Collective over ``members``.

    Raises:
        ConfigError: some ranks do.
    """
    _ask({"rank": rank, "choice": None, "refusal": None}, members, gather_values)


def _ask(own: dict[str, Any], members: ProcessSet, gather_values: GatherValues) -> list[dict[str, Any]]:
    """All ranks' answers, which are known and equal choices."""
    try:
        answers = gather_values(own, "transport.choice", members)
    except TransportError as error:
        raise TransportError(f"{error}; build a compressor on every rank, or on none") from error
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
