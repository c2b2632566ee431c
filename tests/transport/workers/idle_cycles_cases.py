"""How often Horovod's thread asks the other ranks, with the edits of its sources; run by test_idle_cycles.py."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import horovod.torch as hvd
from worker_tools import case

FRESH = "Horovod reads HOROVOD_TIMELINE when it starts"
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
