"""The allreduce of each step's beginning, without ranks."""

import pytest

from dgc.errors import ConfigError, TransportError
from dgc.torch.engine.horovod import stand_in
from dgc.torch.engine.horovod.stand_in import StandIn


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
    monkeypatch.setattr(stand_in.HOROVOD, "unique_name", lambda *_: "name", raising=False)
    monkeypatch.setattr(stand_in, "_PATIENCE", 0.01)
    hvd = Horovod()
    return hvd, StandIn(hvd, Transport(), None)


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


def test_nothing_is_owed_when_a_step_ends(made):
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
