"""dgc's optimizer under torchrun, where neither Horovod nor mpi4py can be imported."""

from pathlib import Path

import pytest
from launch_tools import run_mpi
from rank_jobs import TORCHRUN, each_case

test_under_torchrun = each_case(Path(__file__).parent / "workers" / "distributed_cases.py", TORCHRUN)

LAST_ACT = """
import numpy as np
import torch.distributed as dist
from dgc.torch.engine.distributed import DistributedTransport

dist.init_process_group("gloo")
transport = DistributedTransport()
transport.allreduce(np.zeros(2**20, np.float32))
for _ in range(20):
    transport.allgather(np.zeros(4096, np.uint8), np.empty((2, 4096), np.uint8))
"""


@pytest.mark.mpi
def test_a_process_may_end_right_after_a_collective():
    run_mpi(2, LAST_ACT, launcher="torchrun")
