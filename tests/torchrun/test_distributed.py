"""How processes end under torchrun: right after a collective, beside a rank that waits, with an error."""

import pytest
from launch_tools import run_mpi

LAST_ACT = """
import numpy as np
import torch.distributed as dist
from dgc.torch.distributed import DistributedTransport

dist.init_process_group("gloo")
transport = DistributedTransport()
transport.allreduce(np.zeros(2**20, np.float32))
for _ in range(20):
    transport.allgather(np.zeros(4096, np.uint8), np.empty((2, 4096), np.uint8))
"""


@pytest.mark.mpi
@pytest.mark.matrix
def test_a_process_may_end_right_after_a_collective():
    run_mpi(2, LAST_ACT, launcher="torchrun")


LEFT_WAITING = """
import os, threading, time, weakref
import numpy as np
import torch.distributed as dist
from dgc.torch import distributed

dist.init_process_group("gloo")
distributed._EXIT_PATIENCE = 0.5
mark, rank = os.path.join(os.environ["DGC_TEST_REPORTS"], "ending"), dist.get_rank()
kept = threading.Event()
weakref.finalize(kept, lambda: open(mark, "w").close() if rank == 0 else None)  # after the transport's
transport = distributed.DistributedTransport()

def gather():
    transport.allgather(np.zeros(4096, np.uint8), np.empty((2, 4096), np.uint8))

gather()
if rank == 0:
    threading.Thread(target=gather, daemon=True).start()
    time.sleep(0.5)
else:
    while not os.path.exists(mark):
        time.sleep(0.001)
    os._exit(0)
"""


@pytest.mark.mpi
def test_a_process_ends_well_while_a_thread_waits_for_a_rank_that_leaves_then():
    result = run_mpi(2, LEFT_WAITING, launcher="torchrun", check=False)
    assert result.returncode == 0, result.explain()
    assert "terminate called" not in result.stderr, result.explain()


RAISES = """
import torch
import torch.distributed as dist
import dgc.torch as dgc

dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
dgc.broadcast_parameters(model.state_dict())
compression = dgc.Compression.dgc(steps=100, bucket_bytes=2**18)
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = dgc.DistributedOptimizer(sgd, model.named_parameters(), compression=compression)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
optimizer.zero_grad()
model(torch.randn(4, 256)).sum().backward()
raise ValueError("buckets are under way")
"""


@pytest.mark.mpi
def test_an_error_before_the_step_is_what_ends_the_process():
    result = run_mpi(2, RAISES, launcher="torchrun", check=False)
    assert "ValueError: buckets are under way" in result.stderr, result.explain()
    assert "exitcode  : 1 " in result.stderr, result.explain()
    assert "terminate called" not in result.stderr, result.explain()
