"""DDP's communication hook under torchrun, where neither Horovod nor mpi4py can be imported."""

from pathlib import Path

import pytest
from launch_tools import run_mpi

DYING = """
import os, signal
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from worker_tools import report
import dgc.torch as dgc

# Stands for NCCL: whatever the default group is, the exchange has a Gloo group of its own.
dist.Backend.register_backend("other", lambda *arguments: dist.ProcessGroupGloo(*arguments), devices=["cpu"])
dist.init_process_group("other")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
before = model.module.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
compression = dgc.Compression.dgc(sparsity=0.0, values="float32", small="float32")
state = dgc.ddp.CompressionState(compression, optimizer)
model.register_comm_hook(state, dgc.ddp.compression_hook)
model(torch.full((1, 3), float(rank))).sum().backward()
optimizer.step()
report((before - model.module.weight.detach()).mean().item())
for step in range(1000):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


WORKER = Path(__file__).parent.parent / "adapters_torch" / "workers" / "ddp_join_cases.py"


@pytest.mark.mpi
@pytest.mark.matrix
def test_join_on_4_ranks(ranks):
    ranks(WORKER, 4, launcher="torchrun").check("join_with_the_state-5-sparse")


@pytest.mark.mpi
def test_another_default_group_and_a_rank_that_dies():
    result = run_mpi(2, DYING, launcher="torchrun", check=False, timeout=120)
    assert result.values == pytest.approx([0.5, 0.5]), result.explain()
    assert result.returncode not in (0, None), result.explain()
    assert not result.timed_out, result.explain()
