"""How many threads the kernels use, and the team of threads that shares their work.

Numba's own parallel loops are not used. They run on OpenMP, or on a pool that two Python threads may not enter at the
same time. They end in a barrier, where all threads wait even for a thread that has no work and is not scheduled yet.
OpenMP does not survive a fork, and its threads keep spinning when the framework needs the cores. Here every thread,
also the calling one, takes pieces of the work until none is left, and the call returns when all pieces are done.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np

from dgc.core.kernels.compile import entry
from dgc.core.kernels.simd import fetch_add
from dgc.errors import ConfigError

THREADS_VARIABLE = "DGC_NUM_THREADS"
# Launchers give the number of ranks on this host in one of these variables. The first one that is set counts.
LOCAL_SIZE_VARIABLES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")

# A thread checks this many times whether the work is done before it sleeps. The checks take a few hundred
# microseconds.
LOOKS = 20000
NAP = 5e-5  # seconds of sleep between later checks


def available_cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def default_threads() -> int:
    """Return this process's share of the host's cores: cores // ranks on the host, at least 1."""
    wanted = os.environ.get(THREADS_VARIABLE)
    if wanted is not None:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ConfigError(f"{THREADS_VARIABLE} is {wanted!r}; allowed: a whole number >= 1")
        return int(wanted)
    found = next((os.environ[name] for name in LOCAL_SIZE_VARIABLES if name in os.environ), "1")
    return max(1, available_cores() // max(1, int(found) if found.isdecimal() else 1))


@entry
def _all_done(progress, pieces, looks):
    """Return whether all pieces are done; check up to ``looks`` times."""
    for _ in range(looks):
        if fetch_add(progress, 1, 0) >= pieces:
            return True
    return False


class Team:
    """Threads that help the calling thread with a kernel; they start when first needed and sleep between calls.

    A kernel is called as ``kernel(worker, progress, pieces, *arguments)``. It takes a piece by
    ``fetch_add(progress, 0, 1)`` until none is left, and ends each piece by ``fetch_add(progress, 1, 1)``. It must not
    write after that, because the caller continues when all pieces are done. Several Python threads may call :meth:`run`
    at the same time. A forked child gets a new team.
    """

    def __init__(self) -> None:
        self._reset()
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _reset(itself()))

    def _reset(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._helpers: list[Thread] = []
        self._lock = Lock()
        self._finalizer = weakref.finalize(self, _dismiss, self._jobs, self._helpers)
        self._finalizer.atexit = False  # daemon threads end with the process

    def run(self, threads: int, kernel: Callable[..., None], pieces: int, *arguments: object) -> None:
        """Run a kernel on up to ``threads`` threads, including the calling one; raise an error that any thread meets.

        After the call, no thread works on the arguments' memory, even if an interrupt ended the call.
        """
        work = self.start(min(threads, pieces) - 1, kernel, pieces, *arguments)
        try:
            work.finish()
        except BaseException:
            work.give_up()
            raise

    def start(
        self, helpers: int, kernel: Callable[..., None], pieces: int, *arguments: object, keeps: object = None
    ) -> Work:
        """Let up to ``helpers`` threads begin a kernel while the calling thread does something else.

        Args:
            helpers: the most threads that help, as workers 1, 2, ...; the thread that calls ``finish()`` is worker 0.
            kernel: the kernel.
            pieces: how many pieces its work has.
            arguments: the kernel's arguments.
            keeps: objects whose addresses are among the arguments. They stay alive as long as a thread may work.

        Returns:
            The work. Call its ``finish()`` before reading what the kernel writes.
        """
        work = Work(kernel, pieces, arguments, keeps)
        try:
            if helpers > len(self._helpers):
                self._hire(helpers)
            for worker in range(1, min(helpers, len(self._helpers)) + 1):
                work.shared = True
                self._jobs.put((work, worker))
        except BaseException:
            work.give_up()
            raise
        return work

    def _hire(self, helpers: int) -> None:
        """Start threads until there are ``helpers``, or the system allows no more."""
        with self._lock, contextlib.suppress(RuntimeError):
            while len(self._helpers) < helpers:
                thread = Thread(target=_help, args=(self._jobs,), name="dgc-kernel", daemon=True)
                thread.start()
                self._helpers.append(thread)


class Work:
    """One run of a kernel, on one or several threads."""

    def __init__(self, kernel: Callable[..., None], pieces: int, arguments: tuple[Any, ...], keeps: object) -> None:
        self._kernel, self._pieces, self._arguments, self._keeps = kernel, pieces, arguments, keeps
        self._progress = np.zeros(2, np.int64)
        self.shared = False  # whether the work was offered to another thread
        self._errors: list[Exception] = []
        self._started: list[int] = []
        self._finished: list[int] = []

    def help(self, worker: int) -> None:
        """Do pieces of the work on a helper's thread."""
        self._started.append(worker)
        try:
            self._kernel(worker, self._progress, self._pieces, *self._arguments)
        except Exception as error:
            self._errors.append(error)
        self._finished.append(worker)

    def finish(self) -> None:
        """Do the rest of the work, and wait for the other threads. Raise an error that a thread has met."""
        progress, pieces = self._progress, self._pieces
        if progress[1] >= pieces:
            return
        try:
            self._kernel(0, progress, pieces, *self._arguments)
            while self.shared and not _all_done(progress, pieces, LOOKS):
                if self._errors:
                    raise self._errors[0]
                # The system has interrupted a helper in the middle of a piece.
                time.sleep(NAP)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Skip the rest of the work. After this call no thread works on it."""
        self._progress[0] = self._pieces  # no thread takes another piece
        _wait_for(self._started, self._finished)


Job = tuple[Work, int]  # work that is offered to one thread, and that thread's worker number


def _reset(team: Team | None) -> None:
    if team is not None:
        team._reset()


def _help(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        work, worker = job
        work.help(worker)
        # While this thread waits for its next job, it must not keep the finished one alive.
        del job, work


def _wait_for(started: list[int], finished: list[int]) -> None:
    """Wait until all helpers that have started are done, even after an interrupt: the caller may free their memory.

    A piece takes about a millisecond. A helper that starts later finds no piece.
    """
    while True:
        try:
            while len(finished) < len(started):
                time.sleep(NAP)
            return
        except BaseException:  # the first interrupt is being raised already
            continue


def _dismiss(jobs: SimpleQueue[Job | None], helpers: list[Thread]) -> None:
    for _ in helpers:
        jobs.put(None)
