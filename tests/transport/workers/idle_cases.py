"""How often Horovod's thread asks the other ranks, with the edits of its sources, and collectives that find it idle."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import horovod.torch as hvd
import torch
from worker_tools import case

FRESH = "where process sets may come later, Horovod's thread does not idle; and the timeline is read when it starts"
os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"

CYCLE = 1e-3
"""Seconds of a cycle, Horovod's default."""


@case
def ranks_that_idle_ask_less_often():
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"timeline{hvd.rank()}"
        hvd.barrier()
        hvd.start_timeline(str(path), mark_cycles=True)
        begin = time.monotonic()
        time.sleep(2.0)
        seconds = time.monotonic() - begin
        hvd.stop_timeline()
        hvd.barrier()
        if hvd.rank() == 0:
            cycles = path.read_text().count("CYCLE_START")
            assert 0 < cycles < 0.2 * seconds / CYCLE, f"{cycles} cycles in {seconds} s"


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
