"""The dense baseline of dgc's optimizer under torchrun, beside a Horovod that is not initialised."""

import pytest
from launch_tools import run_mpi

BESIDE_HOROVOD = """
import inspect
import sys
import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dgc.torch as dgc

dist.init_process_group("gloo")
inspect.getmembers(dgc.Compression)
sys.setswitchinterval(1000)  # a thread of Gloo's that waited for the GIL would abort the process at its end

def trained(compression, ddp=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5)
    model = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not ddp:
        optimizer = dgc.DistributedOptimizer(optimizer, compression=compression)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

expected = trained(None, ddp=True)
for compression in (None, dgc.Compression.none, hvd.Compression.none):
    assert torch.equal(trained(compression), expected), compression
for compression in (dgc.Compression.fp16, hvd.Compression.fp16):
    half = trained(compression)
    assert not torch.equal(half, expected)
    torch.testing.assert_close(half, expected, rtol=1e-2, atol=1e-2)
dist.destroy_process_group()
"""


@pytest.mark.mpi
def test_beside_a_horovod_that_is_not_initialised():
    run_mpi(2, BESIDE_HOROVOD, launcher="torchrun")
