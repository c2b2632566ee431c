"""A rank that waits for one that never comes: on real ranks."""

import contextlib
import re
import threading
import time
from types import SimpleNamespace

import pytest
from launch_tools import run_mpi

from dgc.errors import ConfigError, StallError, TransportError
from dgc.transport import mpi
from dgc.transport.waits import mpi_stall
from dgc.transport.waits.mpi_stall import seconds_of

STOPPED = """
import os, signal, time, warnings
import horovod.torch as hvd
hvd.init()
import numpy as np
from dgc.errors import StallError
from dgc.transport.mpi import MPITransport
from dgc.transport.waits.mpi_stall import StallWatch
from mpi4py import MPI
from worker_tools import report

transport = MPITransport()
out = np.empty((3, 4), np.uint8)
transport.allgather(np.zeros(4, np.uint8), out)
os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="2", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="10")
transport._stall = StallWatch(MPI, transport._comm)
if hvd.rank() == 2:
    time.sleep(0.7)  # late, but in time, also on a busy machine
transport.allgather(np.zeros(4, np.uint8), out)
if hvd.rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        transport.allgather(np.zeros(4, np.uint8), out)
    except StallError as error:
        report([[str(w.message) for w in caught if "still waits" in str(w.message)], str(error)])
        raise
"""


@pytest.mark.mpi
def test_a_rank_that_is_stopped_is_named_and_given_up_and_the_job_ends():
    result = run_mpi(3, STOPPED, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    told = [values for values in result.values if values]
    assert told, result.explain()  # the first one that ends, ends the others
    for (warning,), error in told:
        assert re.search(r"still waits in an exchange of gradients: it has waited \d+ s for rank 2: stopped", warning)
        assert re.search(r"gives up in an exchange of gradients: it has waited \d+ s for rank 2: stopped", error)
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in error


STOPPED_IN_TRAINING = """
import os, signal
import horovod.torch as hvd, torch
hvd.init()
import dgc.core.exchange.pipeline as pipeline, dgc.torch as dgc
from dgc.transport.waits.mpi_stall import StallWatch
from mpi4py import MPI

pipeline._STALL_PATIENCE = 1.0
torch.manual_seed(0)
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = list(model.named_parameters())
compression = dgc.Compression.dgc(names, optimizer=optimizer)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
for step in range(5):
    if step == 3:
        os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3")
        transport = compression.engine.transport
        transport._stall = StallWatch(MPI, transport._comm)
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    model(torch.ones(2, 50)).sum().backward()
    optimizer.step()
"""


@pytest.mark.mpi
def test_a_caller_that_waits_in_horovod_for_a_rank_that_is_stopped_is_ended():
    result = run_mpi(2, STOPPED_IN_TRAINING, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    assert "rank 0 gives up" in result.stderr, result.explain()


@pytest.mark.parametrize(("text", "seconds"), [("", 7.0), (" 3.5 ", 3.5), ("0", 0.0)])
def test_seconds_come_from_the_environment(monkeypatch, text, seconds):
    monkeypatch.setenv("SOME_SECONDS", text)
    assert seconds_of("SOME_SECONDS", 7.0) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_other_times_are_refused(monkeypatch, text):
    monkeypatch.setenv("SOME_SECONDS", text)
    with pytest.raises(ConfigError, match=r"SOME_SECONDS is .* a number of seconds"):
        seconds_of("SOME_SECONDS", 7.0)


class Signs:
    """A communicator of two ranks as rank 0 sees it, with what rank 1 has sent."""

    rank, size = 0, 2
    ANY_SOURCE, INT64_T = -1, None

    def __init__(self):
        self.sent, self.told = [], []

    def Status(self):
        return self

    def Get_source(self):
        return 1

    def Iprobe(self, source, tag, status):
        return bool(self.sent)

    def Recv(self, buffer, source, tag):
        buffer[0][0] = self.sent.pop(0)

    def Isend(self, buffer, rank, tag):
        self.told.append(int(buffer[0][0]))
        return self

    def Test(self):
        return True

    def Is_finalized(self):
        return False


@pytest.fixture
def signs(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600")
    monkeypatch.setattr(mpi_stall, "ranks_in_job", lambda mpi, comm: [0, 1])
    return Signs()


def test_a_rank_that_says_it_is_busy_is_waited_for_until_it_has_been_silent_for_as_long(signs):
    watch = mpi_stall.StallWatch(signs, signs)
    watch.begin()
    watch.look(30.0)
    signs.sent.append(mpi_stall._BUSY)
    with pytest.warns(RuntimeWarning, match="still waits"):
        watch.look(500.0)
    watch.look(1099.0)
    with pytest.raises(StallError, match="has waited 1100 s for rank 1"):
        watch.look(1100.0)


def test_a_rank_that_was_busy_in_an_earlier_wait_is_not_waited_for_longer_in_the_next(signs):
    watch = mpi_stall.StallWatch(signs, signs)
    watch.begin()
    signs.sent.append(mpi_stall._BUSY)
    with pytest.warns(RuntimeWarning):
        watch.look(500.0)
    watch.begin()
    with pytest.raises(StallError):
        watch.look(600.0)


def test_a_busy_rank_says_so_until_it_is_through(signs, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.1")
    watch = mpi_stall.StallWatch(signs, signs)
    with watch.busy():
        deadline = time.monotonic() + 300
        while len(signs.told) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert set(signs.told) == {mpi_stall._BUSY}
    assert len(signs.told) >= 2
    assert not [thread for thread in threading.enumerate() if thread.name == "dgc-busy"]


def test_work_is_done_where_no_thread_can_be_started(signs, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with mpi_stall.StallWatch(signs, signs).busy():
        done = True
    assert done


class Clock:
    """A time that goes on slowly, and in jumps: this process does not run."""

    def __init__(self, jumps):
        self.now, self._jumps = 0.0, dict(jumps)
        self.slept = 0

    def perf_counter(self):
        self.now += 1e-5
        return self.now

    def sleep(self, seconds):
        self.slept += 1
        self.now += seconds + self._jumps.pop(self.slept, 0.0)


class Looks:
    """In the place of a StallWatch: notes when it was asked, and gives up after a minute."""

    next_look = 2.0

    def __init__(self):
        self.waited = []

    def begin(self):
        pass

    def look(self, waited):
        self.waited.append(waited)
        if waited > 60:
            raise StallError("gave up")


def waiting_transport(monkeypatch, clock, tests):
    """An MPITransport without MPI, and how many collectives it has begun; each is over after ``tests`` looks."""
    begun, left, request = [], [], SimpleNamespace(Test=object())

    def call(_, function):
        if function is request.Test:
            left[0] -= 1
            return left[0] < 0
        begun.append(function)
        left[:] = [tests]
        return request

    for name, stand_in in (
        ("time", clock),
        ("call", call),
        ("waiting", contextlib.nullcontext),
        ("abort_at_exit", lambda: None),
    ):
        monkeypatch.setattr(mpi, name, stand_in)
    transport = mpi.MPITransport.__new__(mpi.MPITransport)
    vars(transport).update(_mpi=None, _stall=Looks(), _gave_up=False)
    return transport, begun


def test_a_job_that_was_suspended_has_not_waited(monkeypatch):
    """All ranks are stopped for ten minutes, twice; each goes on before the others have answered."""
    clock = Clock({10: 600.0, 20: 900.0})
    transport, begun = waiting_transport(monkeypatch, clock, tests=1000)
    transport._wait(lambda: None, 0)
    assert len(begun) == 1
    assert clock.now > 1500
    assert transport._stall.waited == []


def test_a_rank_that_runs_and_waits_is_looked_after(monkeypatch):
    clock = Clock({n: 4.0 for n in range(10, 13)})  # a busy machine is no suspended one
    transport, _ = waiting_transport(monkeypatch, clock, tests=1000)
    transport._wait(lambda: None, 0)
    assert transport._stall.waited[0] == pytest.approx(4.0, abs=0.1)


def test_after_a_stall_the_transport_is_not_used_again(monkeypatch):
    """The collective that was given up is still under way; the next one would be paired with it."""
    transport, begun = waiting_transport(monkeypatch, Clock({n: 4.0 for n in range(5, 100)}), tests=10**6)
    with pytest.raises(StallError, match="gave up"):
        transport._wait(lambda: None, 0)
    assert len(begun) == 1
    for _ in range(2):
        with pytest.raises(TransportError, match="given up waiting for others in an earlier exchange; restart"):
            transport._wait(lambda: None, 0)
    assert len(begun) == 1
