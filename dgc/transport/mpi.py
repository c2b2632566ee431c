"""The transport over MPI, through mpi4py and a separate communicator: collectives, waiting, and leaving the job.

P = number of ranks, m = message bytes, n = elements.

**How a rank waits.** Open MPI's blocking collectives spin. This takes a core from the backward pass, which then runs at
72 to 76 % of its speed. So every collective here is non-blocking. A rank polls for the end, first without pause and
then with growing sleeps. The backward pass runs at 97 to 101 % of its speed, and ranks notice the end of a collective
as early as with spinning (``benchmarks/transport.py``). On an idle machine, 25 kB take 12 microseconds instead of 5.

**How large messages are sent.** A rank that sleeps moves no data. Where shared memory copies through small buffers,
16 MB took 101 ms with sleeps of 0.5 ms, and 4 ms without. So a large collective begins with eight bytes from every
rank. A rank sleeps until all of these have arrived. After that, all ranks poll without pause for as long as the
transfer should take.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from typing_extensions import override

from dgc.core.collectives import (
    SMALL_BYTES,
    Divisible,
    check_allgather,
    check_allreduce,
    check_alltoall,
    gather_values,
    reduce_in_rank_order,
)
from dgc.errors import ConfigError, StallError, TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

Result = TypeVar("Result")

# An allreduce works in chunks that stay in the cache between receiving and adding (0.25 to 8 MiB were equally fast).
# With many ranks a chunk is larger, because each rank sends only 1/P of it.
CHUNK_BYTES = 1024 * 1024
CHUNK_BYTES_PER_RANK = 64 * 1024

BROADCAST_BYTES = 256 * 1024 * 1024  # the most bytes in one call, because MPI counts them in a C int

# A waiting rank polls without pause for SPIN_SECONDS, plus the time of the transfer at this speed, because a collective
# that all ranks have reached ends sooner than a sleep does. During a slower transfer a rank may sleep: the operating
# system's buffers keep the data moving.
SPIN_SECONDS = 100e-6
BYTES_PER_SECOND = 1e9

# After that, a rank sleeps between two polls for a quarter of the time that it has waited so far. So a wait becomes at
# most a quarter longer, and a rank polls rarely in a long wait.
SHORTEST_SLEEP = 20e-6
LONGEST_SLEEP = 500e-6
SLEEP_FRACTION = 0.25

# Horovod's variables. Horovod waits for ever by default; a rank here gives up after ten minutes, as Gloo and NCCL do.
WARN_VARIABLE, WARN_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0
LIMIT_VARIABLE, LIMIT_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 600.0
OFF_VARIABLE = "HOROVOD_STALL_CHECK_DISABLE"

# Polls are milliseconds apart. If this much time passes between two of them, the process itself was suspended.
SUSPENDED_SECONDS = 5.0

_OUT_OF_STEP = (
    ". Ranks do different things at the same time: every rank must make the same steps, the same calls to "
    "average() and the same loads, in the same order. A rank that has to stop or to save (because of a signal "
    "or its own metric) must tell the others first (hvd.allreduce)"
)


def import_mpi(*, start: bool = True) -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI unless Horovod has done so, or ``start`` is False."""
    try:
        import mpi4py

        before = mpi4py.rc.initialize
        mpi4py.rc.initialize = start and before
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = before
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportError(
            f"the mpi transport needs mpi4py and an MPI library, and importing mpi4py.MPI failed: {error}. "
            'Install mpi4py (pip install mpi4py) for the MPI that Horovod was built with, or use transport="horovod".'
        ) from error
    return MPI


def why_unusable(
    mpi: ModuleType, comm: Any, expect_rank: int | None = None, expect_size: int | None = None
) -> str | None:
    """Return why ``comm`` cannot carry an exchange; None if it can. The expected rank and size are Horovod's."""
    if not mpi.Is_initialized() or mpi.Is_finalized():
        state = "is finalized" if mpi.Is_finalized() else "is not initialised"
        return f"MPI {state}: call hvd.init() (or import mpi4py.MPI) first, and stop exchanging before hvd.shutdown()"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            "MPI was initialised without MPI_THREAD_MULTIPLE, but the exchange runs on a thread of its own. Horovod "
            "and mpi4py request it by default: look for mpi4py.rc.thread_level or mpi4py.rc.threads in the script, "
            "for HOROVOD_MPI_THREADS_DISABLE in the environment, and for an MPI library built without it"
        )
    if (expect_size is not None and comm.size != expect_size) or (expect_rank is not None and comm.rank != expect_rank):
        return (
            f"mpi4py sees rank {comm.rank} of {comm.size} where Horovod has rank {expect_rank} of {expect_size}. Under "
            "horovodrun --gloo mpi4py sees a world of one, and with hvd.init(comm=...) a world of other ranks"
        )
    return None


class MPITransport(Divisible):
    """Collectives of mpi4py on a duplicate of a communicator, so that they receive no messages of other libraries.

    One thread at a time calls them, in the same order on every rank. Other threads may use MPI at the same time.

    An ``allreduce`` is bit-identical on every rank, with any MPI library. Each rank receives all ranks' values of one
    part of the array, adds them in rank order, and sends the sums to all ranks. So each sum is computed only once, on
    one rank, and equals that of :class:`~dgc.transport.local.LocalTransport`. It moves as many bytes as a ring does.
    """

    name = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        expect_rank: int | None = None,
        expect_size: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Duplicate ``comm``. Collective over its ranks or, if ``ranks`` is given, over these only.

        Args:
            comm: the communicator of the job; ``MPI.COMM_WORLD`` if None.
            expect_rank: Horovod's rank, which ``comm`` must have; None to accept any.
            expect_size: Horovod's size, which ``comm`` must have; None to accept any.
            ranks: the ranks in ``comm`` that form the group (a process set), in the group's order.
        """
        self._mpi = import_mpi()
        parent = self._mpi.COMM_WORLD if comm is None else comm
        reason = why_unusable(self._mpi, parent, expect_rank, expect_size)
        if reason is not None:
            raise TransportError(f'{reason}. transport="auto" or transport="horovod" works there.')
        with _as_transport_error("creating a communicator"):
            self._comm = parent.Dup() if ranks is None else _subgroup(parent, ranks)
            # A communicator that other code has made may abort the job after an error.
            self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
            expect_farewell(self._mpi, self._comm)
            self._name = ranks_in_job(self._mpi, self._comm)[self._comm.rank]
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self._closed = False
        self._warn = longest_wait(WARN_VARIABLE, WARN_SECONDS)
        self._limit = longest_wait(LIMIT_VARIABLE, LIMIT_SECONDS)
        self._gave_up = False
        self._workspace = np.empty(0, np.uint8)
        self._announcements = np.empty(self.size, np.int64)

    @override
    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        self._require_open()
        check_allgather(message, out, self.size)
        with _as_transport_error(f"allgather of {message.size} bytes"):
            if out.nbytes > SMALL_BYTES:
                self._wait_for_everybody(message.nbytes)
            self._gather(message, out)

    @override
    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        self._require_open()
        check_allreduce(array, op)
        if self.size == 1 or array.size == 0:
            return
        with _as_transport_error(f"allreduce of {array.size} {array.dtype.name}"):
            if array.nbytes * self.size <= SMALL_BYTES:
                parts = self._borrow(array.nbytes * self.size).reshape(self.size, array.nbytes)
                self._gather(array.view(np.uint8), parts)
                reduce_in_rank_order(parts.view(array.dtype), op, array)
                return
            self._wait_for_everybody(array.nbytes)
            step = max(CHUNK_BYTES, CHUNK_BYTES_PER_RANK * self.size) // array.itemsize
            for start in range(0, array.size, step):
                self._reduce_chunk(array[start : start + step], op)

    @override
    def alltoall(self, message: np.ndarray, out: np.ndarray) -> None:
        self._require_open()
        check_alltoall(message, out, self.size)
        byte = self._mpi.BYTE
        with _as_transport_error(f"alltoall of {message.nbytes} bytes"):
            if out.nbytes > SMALL_BYTES:
                self._wait_for_everybody(message.nbytes)
            self._wait(partial(self._comm.Ialltoall, [message, byte], [out, byte]), out.nbytes)

    @override
    def broadcast(self, array: np.ndarray) -> None:
        self._require_open()
        if self.size == 1 or array.size == 0:
            return
        data = array.reshape(-1).view(np.uint8)
        with _as_transport_error(f"broadcast of {data.size} bytes"):
            if data.size > SMALL_BYTES:
                self._wait_for_everybody(data.size)
            for start in range(0, data.size, BROADCAST_BYTES):
                part = data[start : start + BROADCAST_BYTES]
                self._wait(partial(self._comm.Ibcast, [part, self._mpi.BYTE], 0), part.size)

    @override
    def split(self, color: int) -> MPITransport:
        self._require_open()
        with _as_transport_error("splitting a communicator"):
            part: Any = self._comm.Split(color, self.rank)
        try:
            return MPITransport(part)
        finally:
            part.Free()

    @override
    def nodes(self) -> list[int]:
        self._require_open()
        with _as_transport_error("looking for ranks on the same machine"):
            near = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
            lowest = near.bcast(self.rank, 0)
            near.Free()
        return gather_values(self, lowest)

    @override
    def close(self) -> None:
        """Refuse every later call. The communicator (8 kB) stays until the process ends.

        If it were freed in the middle of another rank's exchange, Open MPI would deliver that rank's message to the
        next communicator with the same number, or end the process if the sender is not in that communicator.
        """
        self._closed = True

    @override
    def end_job(self, error: Exception) -> None:
        give_up(self._mpi, str(error))

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("this mpi transport is closed")
        if is_child():
            raise TransportError("this process was forked from a rank of an MPI job and has no part in it")
        if self._mpi.Is_finalized():
            # Any call of MPI would abort the process now.
            raise TransportError("MPI is finalized: stop exchanging before hvd.shutdown()")

    def _borrow(self, size: int) -> np.ndarray:
        if self._workspace.size < size:
            self._workspace = np.empty(size, np.uint8)
        return self._workspace[:size]

    def _gather(self, message: np.ndarray, out: np.ndarray) -> None:
        byte = self._mpi.BYTE
        self._wait(partial(self._comm.Iallgather, [message, byte], [out, byte]), out.nbytes)

    def _wait_for_everybody(self, size: int) -> None:
        """Sleep until all ranks have reached the collective; refuse different sizes."""
        announced = np.array([size], np.int64)
        self._wait(lambda: self._comm.Iallgather(announced, self._announcements), 0)
        if (self._announcements != size).any():
            raise TransportError(f"the ranks came with different sizes: {self._announcements.tolist()} bytes")

    def _reduce_chunk(self, chunk: np.ndarray, op: str) -> None:
        """Reduce ``chunk`` in place: rank r adds up part r of it, then all ranks get all parts."""
        length = -(-chunk.size // self.size)
        starts = [min(rank * length, chunk.size) for rank in range(self.size)]
        counts = [min(start + length, chunk.size) - start for start in starts]
        mine = counts[self.rank]
        parts = self._borrow(mine * self.size * chunk.itemsize).view(chunk.dtype)
        places = [rank * mine for rank in range(self.size)]
        datatype = self._mpi.FLOAT if chunk.dtype == np.float32 else self._mpi.DOUBLE
        self._wait(
            lambda: self._comm.Ialltoallv(
                [chunk, counts, starts, datatype], [parts, [mine] * self.size, places, datatype]
            ),
            chunk.nbytes,
        )
        own = chunk[starts[self.rank] : starts[self.rank] + mine]
        reduce_in_rank_order(parts.reshape(self.size, mine), op, own)
        self._wait(lambda: self._comm.Iallgatherv(self._mpi.IN_PLACE, [chunk, counts, starts, datatype]), chunk.nbytes)

    def _wait(self, collective: Callable[[], Any], size: int) -> None:
        """Begin ``collective`` and wait for its end. Its ``size`` in bytes decides how long to poll without pause."""
        if self._gave_up:
            # The others may still reach the collective that this rank gave up. MPI would match it with this one.
            raise TransportError("this rank has given up waiting for others in an earlier exchange; restart the job")
        begun = seen = time.perf_counter()
        spin, patience = SPIN_SECONDS + size / BYTES_PER_SECOND, min(self._warn, self._limit)
        with waiting():
            request = call(self._mpi, collective)
            while not call(self._mpi, request.Test):
                now = time.perf_counter()
                if now - seen > SUSPENDED_SECONDS:
                    begun += now - seen  # this process was suspended, which does not count as waiting
                seen, waited = now, now - begun
                if waited > spin:
                    if waited > patience:
                        self._complain(waited)
                        patience = self._limit
                    time.sleep(min(LONGEST_SLEEP, max(SHORTEST_SLEEP, SLEEP_FRACTION * waited)))

    def _complain(self, waited: float) -> None:
        """Warn about a long wait, or give up: a broken link or a stopped process raises no error."""
        does = "gives up" if waited > self._limit else "still waits"
        text = (
            f"rank {self._name} {does} in an exchange of gradients: it has waited {waited:.0f} s for a rank that is "
            "stopped, cut off from the network, busy (an evaluation, a checkpoint), or out of batches: with fewer "
            "batches than others it must call join() of dgc.torch or dgc.tensorflow, not hvd.join(). "
            f"{LIMIT_VARIABLE} is the longest wait in seconds ({_in_seconds(self._limit)}; 0: for ever), "
            f"{WARN_VARIABLE} the wait before a warning ({_in_seconds(self._warn)})"
        )
        if waited > self._limit:
            self._gave_up = True
            abort_at_exit()
            raise StallError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _subgroup(parent: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Make a communicator of some of ``parent``'s ranks. Collective over these ranks."""
    members = [int(rank) for rank in ranks]
    if len(set(members)) != len(members) or not all(0 <= rank < parent.size for rank in members):
        raise TransportError(f"a process set names distinct ranks below {parent.size}, got {members}")
    if parent.rank not in members:
        raise TransportError(
            f"rank {parent.rank} is not in the process set {members}: only members may make a transport"
        )
    group = parent.Get_group()
    subgroup = group.Incl(members)
    try:
        return parent.Create_group(subgroup)
    finally:
        subgroup.Free()
        group.Free()


@contextmanager
def _as_transport_error(what: str) -> Iterator[None]:
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        advice = _OUT_OF_STEP if error.Get_error_class() == MPI.ERR_TRUNCATE else ""
        raise TransportError(f"mpi transport, {what}: {error}{advice}") from error


# -- how long a rank waits ---------------------------------------------------------------------------------------


def longest_wait(variable: str, default: float) -> float:
    """Return the seconds in a variable of Horovod's stall inspector; infinite for 0, or if the inspector is off."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigError(f"{variable} is {text!r}; allowed: a number of seconds, 0 for none")
    off = os.environ.get(OFF_VARIABLE, "0") not in ("", "0")
    return float("inf") if off or not seconds else seconds


def _in_seconds(seconds: float) -> str:
    return f"now {0 if seconds == float('inf') else seconds:g}"


# -- how a process leaves the job --------------------------------------------------------------------------------
#
# A collective may be over on one rank before another rank has all its bytes. If the first rank's process ends at that
# moment, Horovod's exit handler shuts Horovod down on all ranks, and MPI is finalized while the other rank is still
# waiting. So the ranks meet in a barrier before they end. The barrier has a separate communicator, because a rank that
# failed must not be matched with a rank that still waits in a collective. It has a time limit, because a rank that
# failed does not arrive.

FAREWELL_SECONDS = 5.0  # the longest wait for other ranks, which may have failed or may still be evaluating
NAP = 200e-6

_calling = threading.Lock()  # held while MPI is called for a collective: leaving and MPI_Finalize wait for that call
_leaving = threading.Event()
_missing = threading.Event()
_waiting: Counter[int] = Counter()  # by thread, the collectives of this rank that are under way or were given up
_forked = threading.Event()  # set in a child that was forked from a rank: it has no part in the job

# A communicator for the barrier of each group of ranks that has ever exchanged; the key is their numbers in the job.
_farewells: dict[tuple[int, ...], MPI.Intracomm] = {}


def expect_farewell(mpi: ModuleType, comm: MPI.Intracomm) -> None:
    """Make the ranks of ``comm`` leave the job together, even if ``comm`` is freed before. Collective."""
    if not _farewells:
        os.register_at_fork(after_in_child=_forked.set)
        # The latest exit handler runs first, so this one runs before Horovod's, which hvd.init() has registered.
        atexit.register(leave)
        _hear_of_finalize(mpi)
    ranks = tuple(ranks_in_job(mpi, comm))
    if ranks not in _farewells:
        _farewells[ranks] = comm.Dup()
        _farewells[ranks].Set_errhandler(mpi.ERRORS_RETURN)


def ranks_in_job(mpi: ModuleType, comm: MPI.Intracomm) -> list[int]:
    """Return the numbers that a communicator's ranks have in the job."""
    group, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    try:
        return [int(rank) for rank in mpi.Group.Translate_ranks(group, list(range(comm.size)), world)]
    finally:
        group.Free()
        world.Free()


@contextmanager
def waiting() -> Iterator[None]:
    """Count a running collective. A failed one stays counted, so that this rank does not go to the barrier."""
    me = threading.get_ident()
    _waiting[me] += 1
    yield
    _waiting[me] -= 1


def call(mpi: ModuleType, function: Callable[[], Result]) -> Result:
    """Run ``function``, which calls MPI. If MPI is finalized, raise an error, because MPI would end the process."""
    with _calling:
        if _leaving.is_set() or mpi.Is_finalized():
            raise TransportError(
                "MPI was shut down while a collective waited: this process or another rank ended. Give every rank the "
                "same number of steps; to stop early, use metrics that are the same on all ranks"
            )
        return function()


def give_up(mpi: ModuleType, text: str) -> None:
    """End the job immediately, because every orderly way to end it would wait for the missing rank."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    mpi.COMM_WORLD.Abort(1)


def abort_at_exit() -> None:
    """Abort the job when this process ends, because Horovod's exit handler would wait for the missing rank for ever."""
    _missing.set()


def say_farewell(mpi: ModuleType) -> None:
    """Wait for all ranks that this rank has exchanged with, for FAREWELL_SECONDS at most."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    with suppress(TransportError):
        requests: list[Any] = call(mpi, lambda: [comm.Ibarrier() for comm in _farewells.values()])
        while (requests := call(mpi, lambda: [r for r in requests if not r.Test()])) and time.monotonic() < deadline:
            time.sleep(NAP)


def leave() -> None:
    """Wait for the other ranks at exit, before Horovod shuts MPI down, and stop all calls of MPI."""
    if is_child():
        return
    from mpi4py import MPI

    if _missing.is_set() and not MPI.Is_finalized():
        give_up(MPI, "this rank gave up waiting for others: it ends the job")
    # After an uncaught exception, or in the middle of a step, the other ranks do not come to the barrier.
    if getattr(sys, "last_value", None) is None and not any(_waiting.values()):
        say_farewell(MPI)
    _stop_calling()


def is_child() -> bool:
    """Return whether this process was forked from a rank. Other ranks would take its messages for that rank's."""
    return _forked.is_set()


def _hear_of_finalize(mpi: ModuleType) -> None:
    """Stop calling MPI when any thread finalizes it: MPI then first deletes the attributes of COMM_SELF.

    The callback is Python code and needs the GIL. When Python ends a process, it releases the GIL. But if native code
    calls C's ``exit()`` while it holds the GIL, the process hangs, because Horovod's thread finalizes MPI then.
    """
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: _stop_calling())
    mpi.COMM_SELF.Set_attr(key, None)


def _stop_calling() -> None:
    """Refuse further calls of MPI, and wait for a running one."""
    _leaving.set()
    if _calling.acquire(timeout=1.0):
        _calling.release()
