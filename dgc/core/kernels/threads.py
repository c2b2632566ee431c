"""How many threads the kernels use, and the team of threads that shares out their work.

Not Numba's own parallel loops. Those run on OpenMP or on a pool of Numba's that two Python threads may not enter at
once; they end in a barrier, where a thread that the system has not scheduled yet holds up all others although nothing
is left for it to do; and OpenMP neither survives a fork nor stops spinning when the framework needs the cores. Here
every thread takes pieces of the work by ticket, the calling thread among them, and the call returns when all pieces
are done: a helper that comes late finds nothing to do and goes back to sleep.
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
# Where launchers say how many ranks share this host; the first that is set counts.
LOCAL_SIZE_VARIABLES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")

# How often the end of the work is looked for before sleeping, a few hundred microseconds.
LOOKS = 20000
NAP = 5e-5  # seconds of sleep between further looks


def available_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def default_threads() -> int:
    """The process's share of its host: cores // ranks on this host, at least 1."""
    wanted = os.environ.get(THREADS_VARIABLE)
    if wanted is not None:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ConfigError(f"{THREADS_VARIABLE} is {wanted!r}; allowed: a whole number >= 1")
        return int(wanted)
    found = next((os.environ[name] for name in LOCAL_SIZE_VARIABLES if name in os.environ), "1")
    return max(1, available_cores() // max(1, int(found) if found.isdecimal() else 1))


@entry
def _all_done(progress, pieces, looks):
    """Whether all pieces are done, looked for up to ``looks`` times."""
    for _ in range(looks):
        if fetch_add(progress, 1, 0) >= pieces:
            return True
    return False


class Team:
    """Threads that help the calling one with a kernel; they start when first needed and sleep in between.

    A kernel is called as ``kernel(worker, progress, pieces, *arguments)``. It takes pieces 0 to ``pieces`` by
    ``fetch_add(progress, 0, 1)`` until none is left, and after each one does ``fetch_add(progress, 1, 1)``; what it
    writes it writes in between, because the caller may go on once all are done. Any number of Python threads may
    call :meth:`run` at once. After a fork the child has a team of its own.
    """

    def __init__(self) -> None:
        self._reset()
        itself = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _reset(itself()))

    def _reset(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._helpers: list[Thread] = []
        self._lock = Lock()
        self._finalizer = weakref.finalize(self, _dismiss, self._jobs, self._helpers)
        # At the end of the process the helpers are simply left behind.
        self._finalizer.atexit = False

    def run(self, threads: int, kernel: Callable[..., None], pieces: int, *arguments: object) -> None:
        """Run a kernel on up to ``threads`` threads, this one included; returns when all pieces are done.

        However it ends, by an interrupt too, no thread works on the arguments' memory any more.

        Raises:
            Exception: what the kernel raised, on whichever thread.
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
        """Let up to ``helpers`` threads begin with a kernel while this one does something else.

        The caller must call ``finish()`` on what it returns before what the kernel writes is read.

        Args:
            helpers: the most threads; their worker numbers go from 1 up to it, 0 is the thread that finishes.
            kernel: see above.
            pieces: see above.
            arguments: the kernel's.
            keeps: is kept alive as long as a thread may work: what the arguments hold the addresses of.
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
        """Start threads until there are ``helpers``, or no more are allowed."""
        with self._lock, contextlib.suppress(RuntimeError):
            while len(self._helpers) < helpers:
                thread = Thread(target=_help, args=(self._jobs,), name="dgc-kernel", daemon=True)
                thread.start()
                self._helpers.append(thread)


class Work:
    """One run of a kernel, which threads may share."""

    def __init__(self, kernel: Callable[..., None], pieces: int, arguments: tuple[Any, ...], keeps: object) -> None:
        self._kernel, self._pieces, self._arguments, self._keeps = kernel, pieces, arguments, keeps
        self._progress = np.zeros(2, np.int64)
        self.shared = False  # whether it was offered to another thread
        self._errors: list[Exception] = []
        self._started: list[int] = []
        self._finished: list[int] = []

    def help(self, worker: int) -> None:
        """Work on it as one of the threads it was offered to."""
        self._started.append(worker)
        try:
            self._kernel(worker, self._progress, self._pieces, *self._arguments)
        except Exception as error:
            self._errors.append(error)
        self._finished.append(worker)

    def finish(self) -> None:
        """Do what is left of the work, and wait for what others are doing; once it is done, calls do nothing.

        Raises:
            Exception: what the kernel raised, on whichever thread.
        """
        progress, pieces = self._progress, self._pieces
        if progress[1] >= pieces:
            return
        try:
            self._kernel(0, progress, pieces, *self._arguments)
            while self.shared and not _all_done(progress, pieces, LOOKS):
                if self._errors:
                    raise self._errors[0]
                # A helper was interrupted by the system in the middle of a piece.
                time.sleep(NAP)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Leave the rest of the work undone; when this returns, no thread works on it."""
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
        # Until the next job comes, nothing of this one is kept alive.
        del job, work


def _wait_for(started: list[int], finished: list[int]) -> None:
    """Wait, interrupts or not: a piece takes a millisecond, and its memory may be freed after this.

    A helper that starts later finds no piece to take.
    """
    while True:
        try:
            while len(finished) < len(started):
                time.sleep(NAP)
            return
        except BaseException:  # the first one is on its way already
            continue


def _dismiss(jobs: SimpleQueue[Job | None], helpers: list[Thread]) -> None:
    for _ in helpers:
        jobs.put(None)
