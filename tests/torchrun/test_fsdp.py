"""dgc's optimizer between the nodes of FSDP2, under torchrun without Horovod and mpi4py."""

import pytest
from launch_tools import run_mpi

DYING = """
import os, signal
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import dgc.torch as dgc

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(64, 64), mesh=mesh["shard"])
optimizer = dgc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=dgc.Compression.dgc(),
    group=mesh["replicate"].get_group(),
)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    if dist.get_rank() == 3 and optimizer.compression.stats.steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
"""


@pytest.mark.mpi
@pytest.mark.matrix
def test_a_rank_that_dies_ends_the_job():
    result = run_mpi(4, DYING, launcher="torchrun", check=False)
    assert result.returncode > 0, result.explain()
    assert not result.timed_out, result.explain()
    assert "Signal 9 (SIGKILL)" in result.stderr, result.explain()
