"""How a process leaves an MPI job without pulling MPI away from a rank that is still receiving.

A collective may be over on one rank before another has everything. If the first one then ends, Horovod's exit handler
shuts Horovod down on all ranks, and its background thread finalizes MPI beside a rank that waits for the last bytes of
the last step. So ranks say farewell first: on a communicator of its own, because a rank that failed and one that still
waits in a collective must not be matched with each other, and never for longer than a few seconds, because a rank that
failed does not come.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from dgc.errors import TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")

FAREWELL_SECONDS = 5.0
"""The longest wait for ranks that do not come; they have failed, or still evaluate and need nothing from this one."""

NAP = 200e-6

_calling = threading.Lock()
"""Held while MPI is called about a collective, so that leaving, and MPI_Finalize, can wait for the last call."""
_leaving = threading.Event()
_missing = threading.Event()
_waiting: Counter[int] = Counter()
"""Collectives of this rank that are under way or were given up, by thread."""
_forked = threading.Event()
"""Set in a child that was forked from a rank: it has a copy of everything here, and no part in the job."""
_farewells: dict[tuple[int, ...], MPI.Intracomm] = {}
"""A communicator for the farewell of each group of ranks that has ever exchanged, by their ranks in the job."""


def expect_farewell(mpi: ModuleType, comm: MPI.Intracomm) -> None:
    """Let this rank and the others of ``comm`` leave together. Collective over its ranks.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator whose ranks meet at exit; it may be freed long before.
    """
    if not _farewells:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forked.set)
        # Exit handlers run last in, first out: this one before Horovod's, which was there at hvd.init().
        atexit.register(leave)
        _hear_of_finalize(mpi)
    ranks = tuple(ranks_in_job(mpi, comm))
    if ranks not in _farewells:
        _farewells[ranks] = comm.Dup()
        _farewells[ranks].Set_errhandler(mpi.ERRORS_RETURN)


def ranks_in_job(mpi: ModuleType, comm: MPI.Intracomm) -> list[int]:
    """What a communicator's ranks are called in the whole job."""
    group, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    try:
        return [int(rank) for rank in mpi.Group.Translate_ranks(group, list(range(comm.size)), world)]
    finally:
        group.Free()
        world.Free()


@contextmanager
def waiting() -> Iterator[None]:
    """While a collective is under way. One that fails counts for ever: no call can be expected after it."""
    me = threading.get_ident()
    _waiting[me] += 1
    yield
    _waiting[me] -= 1


def call(mpi: ModuleType, function: Callable[[], Result]) -> Result:
    """What ``function`` returns, which calls MPI; a call after MPI_Finalize would end the process without an error.

    Args:
        mpi: the module ``mpi4py.MPI``.
        function: begins or tests a collective, or sends beside one that waits.

    Raises:
        TransportError: MPI is finalized, or will be in a moment.
    """
    with _calling:
        if _leaving.is_set() or mpi.Is_finalized():
            raise TransportError(
                "MPI was shut down while a collective waited: this process or another rank ended. Give every rank the "
                "same number of steps; stop early by metrics that are the same on all ranks"
            )
        return function()


def give_up(mpi: ModuleType, text: str) -> None:
    """End the whole job, here and now: the error is not handled, and every orderly way out waits for a missing rank."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    mpi.COMM_WORLD.Abort(1)


def abort_at_exit() -> None:
    """A rank is missing: Horovod's own exit handler would wait for it for ever."""
    _missing.set()


def say_farewell(mpi: ModuleType, seconds: float = FAREWELL_SECONDS) -> bool:
    """Wait until all ranks that this one exchanged with are here; returns whether they came.

    Args:
        mpi: the module ``mpi4py.MPI``.
        seconds: the longest wait.
    """
    deadline = time.monotonic() + seconds
    try:
        requests: list[Any] = call(mpi, lambda: [comm.Ibarrier() for comm in _farewells.values()])
        while (requests := call(mpi, lambda: [r for r in requests if not r.Test()])) and time.monotonic() < deadline:
            time.sleep(NAP)
    except TransportError:
        return False
    return not requests


def leave() -> None:
    """At exit, before Horovod shuts MPI down: meet the other ranks; no thread calls MPI any more once this returns."""
    if is_child():
        return
    from mpi4py import MPI

    if _missing.is_set() and not MPI.Is_finalized():
        give_up(MPI, "this rank gave up waiting for others: it ends the job")
    # After an uncaught exception, or in the middle of a step, no other rank comes.
    if getattr(sys, "last_value", None) is None and not any(_waiting.values()):
        say_farewell(MPI)
    _stop_calling()


def is_child() -> bool:
    """Whether this process was forked from a rank: what it would send, the other ranks would take for the rank's."""
    return _forked.is_set()


def _hear_of_finalize(mpi: ModuleType) -> None:
    """Call MPI no more when any thread finalizes it: that deletes the attributes of COMM_SELF before all else.

    The callback is Python and needs the GIL. Native code that calls C's ``exit()`` with the GIL held would wait for
    ever for Horovod's thread, which finalizes MPI; Python's own ways out release it.
    """
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: _stop_calling())
    mpi.COMM_SELF.Set_attr(key, None)


def _stop_calling() -> None:
    """Let no call about a collective begin any more, and wait for the one under way."""
    _leaving.set()
    if _calling.acquire(timeout=1.0):
        _calling.release()
