"""The allreduce of each step's beginning, without ranks."""

import pytest
from launch_tools import run_mpi

from dgc.errors import ConfigError, StallError, TransportError
from dgc.torch.engine.horovod import heartbeat
from dgc.torch.engine.horovod.heartbeat import Heartbeat


class Horovod:
    """Two ranks, of which the other is late by as many looks as ``late`` says."""

    Sum = "sum"

    def __init__(self):
        self.late, self.sent, self.total, self.running = 0, 0, 2.0, True

    def allreduce_async_(self, tensor, name, op, process_set):
        assert tensor.item() == 1.0
        self.sent += 1
        self.tensor = tensor
        return self.sent

    def poll(self, handle):
        if not self.running:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        self.late -= 1
        return self.late < 0

    def synchronize(self, handle):
        if not self.running:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        return self.tensor.fill_(self.total)

    def is_initialized(self):
        return self.running


class Transport:
    name, rank, size = "mpi", 0, 2


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(heartbeat.HOROVOD, "unique_name", lambda *_: "name", raising=False)
    monkeypatch.setattr(heartbeat, "_PATIENCE", 0.01)
    hvd = Horovod()
    return hvd, Heartbeat(hvd, Transport(), None)


def test_one_is_sent_in_each_step(made):
    hvd, one = made
    for step in range(5):
        one.send()
        assert hvd.sent == step + 1


def test_a_rank_that_is_late_is_not_waited_for_here_and_nothing_is_left_out(made):
    hvd, one = made
    one.send()
    hvd.late = 10_000
    one.send()
    one.send()
    assert hvd.sent == 1
    hvd.late = 0
    one.check()
    assert hvd.sent == 3


def test_nothing_is_pending_when_a_step_ends(made):
    """A user's next operation has the same number on all ranks."""
    hvd, one = made
    one.send()
    hvd.late = 100
    one.send()
    assert hvd.sent == 1
    one.check(all_came=True)
    assert hvd.sent == 2


def test_a_rank_that_has_joined_is_an_error(made):
    hvd, one = made
    one.send()
    hvd.total = 1.0
    with pytest.raises(ConfigError, match="only 1 of 2 ranks"):
        one.check()


def test_after_a_shutdown_the_error_says_so(made):
    hvd, one = made
    one.send()
    hvd.running = False
    with pytest.raises(TransportError, match=r"Horovod was shut down: train before hvd\.shutdown\(\)"):
        one.send()


def test_where_horovod_carries_the_bytes_a_rank_that_does_not_come_is_given_up(made, monkeypatch):
    monkeypatch.setattr(Transport, "name", "horovod")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.05")
    hvd, _ = made
    hvd.rank = lambda: 0
    one = Heartbeat(hvd, Transport(), None)
    one.send()  # nobody is late
    hvd.late = 10**9
    with pytest.raises(StallError, match=r"rank 0 gives up at the beginning of a step.*checkpoint that it saves alone"):
        one.send()
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "soon")
    with pytest.raises(ConfigError, match="is 'soon'; allowed: a number of seconds"):
        Heartbeat(hvd, Transport(), None)


SAVES_ALONE = """
import sys, tempfile
import horovod.torch as hvd, torch
import dgc.torch as dgc
from worker_tools import report
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
way = sys.argv[1]
compression = dgc.Compression.dgc(*([model.named_parameters()] if way == "A" else []), optimizer=optimizer)
make = hvd.DistributedOptimizer if way == "A" else dgc.DistributedOptimizer
optimizer = make(optimizer, named_parameters=model.named_parameters(), compression=compression)
try:
    for step in range(6):
        if step == 4 and hvd.rank() == 1:
            dgc.save_checkpoint(tempfile.mkdtemp(), model=model, optimizer=optimizer, compression=compression)
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
except Exception as error:
    report(f"{type(error).__name__}: {error}")
    raise
"""


@pytest.mark.mpi
def test_a_rank_that_saves_alone_ends_the_job():
    """One rank is in an allreduce of Horovod's, the other in an allgather: Horovod itself lets both wait for ever."""
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    result = run_mpi(2, SAVES_ALONE, "A", launcher="gloo", env=stall, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    assert "StallError: rank 0 gives up at the beginning of a step" in str(result.values[0]), result.explain()
