"""A rank that waits for one that never comes: on real ranks."""

import contextlib
import re
from types import SimpleNamespace

import pytest
from launch_tools import run_mpi

from dgc.errors import ConfigError, StallError, TransportError
from dgc.transport import mpi
from dgc.transport.mpi import longest_wait

STOPPED_IN_TRAINING = """
import os, signal
import horovod.torch as hvd, torch
hvd.init()
import dgc.core.exchange.pipeline as pipeline, dgc.torch as dgc

pipeline._STALL_PATIENCE = 1.0
os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
torch.manual_seed(0)
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = list(model.named_parameters())
compression = dgc.Compression.dgc(names, optimizer=optimizer)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
for step in range(5):
    if step == 3 and hvd.rank() == 1:
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
    for wanted in (
        r"rank 0 still waits in an exchange of gradients: it has waited \d+ s for",
        r"rank 0 gives up in an exchange of gradients: it has waited \d+ s for .*HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    ):
        assert re.search(wanted, result.stderr), result.explain()


@pytest.mark.parametrize(("text", "seconds"), [("", 7.0), (" 3.5 ", 3.5), ("0", float("inf"))])
def test_seconds_come_from_the_environment(monkeypatch, text, seconds):
    monkeypatch.setenv("SOME_SECONDS", text)
    assert longest_wait("SOME_SECONDS", 7.0) == seconds
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert longest_wait("SOME_SECONDS", 7.0) == float("inf")


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_other_times_are_refused(monkeypatch, text):
    monkeypatch.setenv("SOME_SECONDS", text)
    with pytest.raises(ConfigError, match=r"SOME_SECONDS is .* a number of seconds"):
        longest_wait("SOME_SECONDS", 7.0)


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
    vars(transport).update(_mpi=None, _name=0, _warn=2.0, _limit=60.0, _gave_up=False)
    return transport, begun


def test_a_job_that_was_suspended_has_not_waited(monkeypatch):
    """All ranks are stopped for ten minutes, twice; each goes on before the others have answered."""
    clock = Clock({10: 600.0, 20: 900.0})
    transport, begun = waiting_transport(monkeypatch, clock, tests=1000)
    transport._wait(lambda: None, 0)  # a warning would be an error
    assert len(begun) == 1
    assert clock.now > 1500


def test_after_a_stall_the_transport_is_not_used_again(monkeypatch):
    """The collective that was given up is still under way; the next one would be paired with it."""
    transport, begun = waiting_transport(monkeypatch, Clock({n: 4.0 for n in range(5, 100)}), tests=10**6)
    with pytest.warns(RuntimeWarning), pytest.raises(StallError, match=r"rank 0 gives up .* has waited \d+ s"):
        transport._wait(lambda: None, 0)
    assert len(begun) == 1
    for _ in range(2):
        with pytest.raises(TransportError, match="given up waiting for others in an earlier exchange; restart"):
            transport._wait(lambda: None, 0)
    assert len(begun) == 1
