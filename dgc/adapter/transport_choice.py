"""Choose a Horovod job's transport: the ranks tell each other what they asked for and what they can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dgc.adapter.agreement import error_of, report
from dgc.adapter.checks import warn_once
from dgc.core.collectives import Transport
from dgc.errors import ConfigError, TransportError
from dgc.transport.mpi import MPITransport, import_mpi, why_unusable

CHOICES = ("auto", "mpi", "horovod")

Gather = Callable[[Any, str], list[Any]]  # (value, question) -> every rank's small value, in rank order
_QUESTION = "transport.choice"


def choose_transport(choice: str, hvd: ModuleType, gather: Gather, make_horovod: Callable[[], Transport]) -> Transport:
    """Make the transport for a group of ranks. Collective.

    All ranks decide from the same answers. Otherwise two ranks could wait for each other in different libraries.

    Args:
        choice: "mpi": mpi4py on the MPI that Horovod runs on. "horovod": Horovod's own collectives. "auto": mpi if
            every rank can use it, else horovod, with one warning if Horovod runs on MPI.
        hvd: the framework's Horovod module, initialised.
        gather: asks all ranks of the group.
        make_horovod: makes the framework's Horovod transport for the group.
    """
    # Look for MPI only if it may be used, because importing mpi4py has side effects.
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
    # Under Gloo, Horovod's collectives are the right choice. Under MPI they are slower; without a warning nobody would
    # notice.
    if hvd.mpi_enabled() and answers[0]["rank"] == hvd.rank():
        warn_once(f"gradients are sent through Horovod's own collectives instead of mpi4py's: {refusal}")
    return make_horovod()


def require_no_choice(rank: int, gather: Gather) -> None:
    """Require, on a rank without a compressor, that no other rank makes a transport. Collective."""
    _ask({"rank": rank, "choice": None, "refusal": None}, gather)


def tell_no_choice(error: Exception, rank: int, gather: Gather) -> None:
    """Send an error to the ranks in :func:`choose_transport` or :func:`require_no_choice`. Collective."""
    own = {"rank": rank, "choice": None, "refusal": None}
    report(error, lambda described: gather({**own, "error": described}, _QUESTION))


def _ask(own: dict[str, Any], gather: Gather) -> list[dict[str, Any]]:
    """Return the answers of all ranks; raise an error unless their choices are known and equal."""
    try:
        answers = gather(own, _QUESTION)
    except TransportError as error:
        raise TransportError(f"{error}; build a compressor on every rank, or on none") from error
    for answer in answers:
        if "error" in answer:
            raise error_of(answer["rank"], *answer["error"])
    without = [answer["rank"] for answer in answers if answer["choice"] is None]
    others = [answer["rank"] for answer in answers if answer["choice"] is not None]
    require_all_or_none(without, others)
    if others:
        _require_known_choice(answers)
    return answers


def require_all_or_none(without: Sequence[int], others: Sequence[int]) -> None:
    """Raise an error if there are ranks ``without`` a compressor, and ``others`` with one."""
    if without and others:
        raise ConfigError(
            f"rank {without[0]} has no compressor of dgc's, and rank {others[0]} has one; give every rank the same "
            "compression="
        )


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
    """Return why this rank cannot use mpi4py beside Horovod; None if it can. Not collective."""
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
        mpi = import_mpi(start=False)
    except TransportError as error:
        return str(error)
    if not mpi.Is_initialized():
        return (
            "mpi4py uses another MPI library than Horovod: reinstall one of them for the same MPI "
            "(pip install --no-binary mpi4py mpi4py)"
        )
    return why_unusable(mpi, mpi.COMM_WORLD, hvd.rank(), hvd.size())
