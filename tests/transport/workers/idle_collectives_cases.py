"""Collectives that find Horovod's thread idle; run by test_idle_collectives.py."""

import time

import horovod.torch as hvd
import torch
from worker_tools import case


@case
def collectives_after_idling_are_those_of_all_ranks():
    for step in range(5):
        time.sleep(0.05 * (hvd.rank() + 1))  # some are still idle when others have begun
        total = hvd.allreduce(torch.full((3,), float(hvd.rank() + step)), op=hvd.Sum, name="idle.sum")
        expected = sum(range(hvd.size())) + step * hvd.size()
        assert total.tolist() == [expected] * 3


@case
def a_rank_that_has_joined_delays_nobody_for_ever():
    if hvd.rank() > 0:
        for step in range(10):
            time.sleep(0.03)  # as long as it takes to idle
            total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=f"idle.join.{step}")
            assert total.tolist() == [hvd.size() - 1] * 2
    assert 0 <= hvd.join() < hvd.size()
