"""A rank that waits for others for very long says for which, and gives up in the end.

A link that is down, or a process that is stopped, raises no error: a collective simply never ends. Horovod's own
stall inspector asks the ranks over the same links, and waits with them. So a rank that has waited for long tells each
other one, in a small message of its own, which collective it has come to; from whom no such message has come by the
time of a warning, that one is missing, or cannot be reached. While collectives end in time nothing is sent at all.

A rank that writes a checkpoint for very long says so all the while, and is waited for: only from its last word on do
the others count how long they have waited.

The times are Horovod's: ``HOROVOD_STALL_CHECK_TIME_SECONDS`` and ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``; unlike there
a rank gives up without a setting, after ten minutes, as Gloo and NCCL do.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dgc.errors import ConfigError, StallError, TransportError
from dgc.transport.waits.mpi_exit import call, ranks_in_job

if TYPE_CHECKING:
    from mpi4py import MPI

WARN_VARIABLE = "HOROVOD_STALL_CHECK_TIME_SECONDS"
LIMIT_VARIABLE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
OFF_VARIABLE = "HOROVOD_STALL_CHECK_DISABLE"

WARN_SECONDS = 60.0
LIMIT_SECONDS = 600.0

TAG = 1
_DRAIN_EVERY = 256
"""Collectives after which a rank that never waits long takes in what those that wait for it have sent."""
_BUSY = -1
"""Sent instead of a collective's number by a rank that is busy, and will come."""
_SIGNS = 10
"""Signs of a busy rank within the longest wait."""
_NEVER = float("inf")


class StallWatch:
    """Looks after the waits of one communicator.

    Attributes:
        next_look: seconds of waiting after which :meth:`look` is to be called; until then a wait costs nothing.
    """

    def __init__(self, mpi: ModuleType, comm: MPI.Intracomm) -> None:
        """Read the times. Local: no communication.

        Args:
            mpi: the module ``mpi4py.MPI``.
            comm: whose collectives are waited for; point-to-point messages on it are this object's alone.

        Raises:
            ConfigError: a variable is no number of seconds.
        """
        self._mpi = mpi
        self._comm = comm
        self._warn = longest_wait(WARN_VARIABLE, WARN_SECONDS)
        self._limit = longest_wait(LIMIT_VARIABLE, LIMIT_SECONDS)
        first = min(self._warn, self._limit)
        self._tell_after = min(2.0, first / 2)
        self._names = ranks_in_job(mpi, comm)
        self._pause = min(1.0, first / 20)
        self._number = 0
        self._told = self._warned = False
        self._heard = np.zeros(comm.size, np.int64)
        self._busy = np.zeros(comm.size)
        self._sending: list[tuple[Any, np.ndarray]] = []
        self.next_look = self._tell_after

    def begin(self) -> None:
        """The next collective begins."""
        self._number += 1
        self._busy[:] = 0.0
        if self._number % _DRAIN_EVERY == 0:
            self._listen()
        if self._told:
            self._told = self._warned = False
            self.next_look = self._tell_after

    def look(self, waited: float) -> None:
        """The collective has not ended after ``waited`` seconds, which are more than :attr:`next_look`.

        Raises:
            StallError: that is more than the limit; names the ranks that have not come.

        Warns:
            RuntimeWarning: once in a collective, when it is more than the time of the warning.
        """
        if not self._told:
            self._told = True
            self._tell(self._number)
        self._listen(waited)
        if self._silence(waited) >= self._limit:
            raise StallError(self._message(waited, "gives up"))
        if waited >= self._warn and not self._warned:
            self._warned = True
            warnings.warn(self._message(waited, "still waits"), RuntimeWarning, stacklevel=2)
        self.next_look = waited + self._pause

    def missing(self) -> list[int]:
        """Ranks of the communicator that have not said that they came to this collective."""
        return [r for r in range(self._comm.size) if r != self._comm.rank and self._heard[r] < self._number]

    def tell_busy(self) -> None:
        """Tell the others once that this rank will come, though it waits elsewhere."""
        if self._limit != _NEVER:
            self._tell(_BUSY)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this rank does something that may take long; it tells the others, so that they do not give it up."""
        if self._limit == _NEVER:
            yield
            return
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(self._limit / _SIGNS):
                try:
                    self._tell(_BUSY)
                except TransportError:
                    return  # MPI has ended

        # A daemon: a rank that is killed within its work must not be kept alive by this thread.
        teller = threading.Thread(target=tell, name="dgc-busy", daemon=True)
        with suppress(RuntimeError):  # no thread to be had: what is worked on needs it more
            teller.start()
        try:
            yield
        finally:
            ended.set()
            if teller.ident is not None:
                teller.join()

    # -- inside --------------------------------------------------------------------------------------------------

    def _silence(self, waited: float) -> float:
        """Seconds since a missing rank was last heard of; the longest, if there are several."""
        missing = self.missing()
        return waited - float(self._busy[missing].min()) if missing else waited

    def _tell(self, number: int) -> None:
        """Say to all others which collective this rank has come to, or _BUSY. Nobody is waited for."""

        def send() -> None:
            self._sending = [entry for entry in self._sending if not entry[0].Test()]
            for rank in range(self._comm.size):
                if rank != self._comm.rank:
                    message = np.array([number], np.int64)
                    self._sending.append((self._comm.Isend([message, self._mpi.INT64_T], rank, TAG), message))

        call(self._mpi, send)

    def _listen(self, waited: float = 0.0) -> None:
        number = np.empty(1, np.int64)
        status = self._mpi.Status()

        def receive() -> None:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, TAG, status):
                source = status.Get_source()
                self._comm.Recv([number, self._mpi.INT64_T], source, TAG)
                if number[0] == _BUSY:
                    self._busy[source] = waited
                else:
                    self._heard[source] = max(self._heard[source], number[0])

        call(self._mpi, receive)

    def _message(self, waited: float, does: str) -> str:
        names = self._names
        missing = [names[rank] for rank in self.missing()]
        if missing:
            others = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            why = "stopped, cut off from the network, in fewer steps, or busy (an evaluation, a checkpoint)"
        else:
            others, why = "bytes of ranks that have come", "the network is slow, or a part of it is down"
        return (
            f"rank {names[self._comm.rank]} {does} in an exchange of gradients: it has waited {waited:.0f} s for "
            f"{others}: {why}. {LIMIT_VARIABLE} is the longest wait in seconds ({_shown(self._limit)}; 0: for ever), "
            f"{WARN_VARIABLE} that before a warning ({_shown(self._warn)})"
        )


def longest_wait(variable: str, default: float) -> float:
    """The seconds in a variable of Horovod's stall inspector; infinite for 0, and where the inspector is switched off.

    Raises:
        ConfigError: it is no number, or negative.
    """
    off = os.environ.get(OFF_VARIABLE, "0") not in ("", "0")
    return _NEVER if off else seconds_of(variable, default) or _NEVER


def seconds_of(variable: str, default: float) -> float:
    """The number of seconds in a variable of the environment; ``default`` if it is not set.

    Raises:
        ConfigError: it is no number, or negative.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"{variable} is {text!r}; allowed: a number of seconds, 0 for none")
    return value


def _shown(seconds: float) -> str:
    return "never" if seconds == _NEVER else f"now {seconds:g}"
