"""Ranks that add up entries for each other, on real ranks over Gloo, with DDP's hook."""

import pytest
from launch_tools import run_mpi

TRAINING = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from adapters_torch import torchrun_tools  # which initialises torch.distributed
from worker_tools import report
import dgc.torch as dgc
from dgc.core.exchange import owners, sizes
from dgc.torch.distributed import DistributedTransport

usual = owners.SUMS_PER_ENTRY, sizes.COLLECTIVE_BYTES
owners.SUMS_PER_ENTRY, sizes.COLLECTIVE_BYTES = 0.5, 0  # by default owners never pay on 4 ranks
rank, dealt, alltoall = dist.get_rank(), [], DistributedTransport.alltoall

def counting(transport, parts, out):
    alltoall(transport, parts, out)
    dealt.append(len(parts))
    if len(dealt) == DIES_AFTER and rank == 1:
        os._exit(0)  # torchrun takes this for success, so it does not end the other ranks

DistributedTransport.alltoall = counting

def build():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(60, 150), torch.nn.LayerNorm(150), torch.nn.Linear(150, 40))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compression = dgc.Compression.dgc(sparsity=0.9, error_feedback="classic")
    dgc.ddp.register(model, optimizer, compression)
    return model, optimizer, compression

def train(model, optimizer, first, stop):
    for step in range(first, stop):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
"""

EQUAL = """
model, optimizer, compression = build()
train(model, optimizer, 0, 6)
gathered = [None] * 4
dist.all_gather_object(gathered, [p.detach() for p in model.parameters()])
report([
    set(dealt) == {4},
    compression.describe()["exchange"] == "owners",
    any(bucket.w.any() for bucket in compression.engine.exchange.state.buckets),
    all(torch.equal(a, b) for other in gathered for a, b in zip(other, gathered[0])),
])
(owners.SUMS_PER_ENTRY, sizes.COLLECTIVE_BYTES), DistributedTransport.alltoall = usual, alltoall  # they live on
"""


SURVIVES = """
model, optimizer, compression = build()
try:
    train(model, optimizer, 0, 1000)
except Exception as error:
    report(type(error).__name__)
    os._exit(0)
"""


@pytest.mark.mpi
def test_ranks_add_up_entries_for_each_other_and_replicas_are_equal(ranks):
    result = ranks.run(TRAINING.replace("DIES_AFTER", "0") + EQUAL, 4, launcher="torchrun")
    assert result.values == [[True] * 4] * 4, result.explain()


@pytest.mark.mpi
def test_if_a_rank_is_gone_between_the_phases_the_others_raise_an_error():
    result = run_mpi(4, TRAINING.replace("DIES_AFTER", "3") + SURVIVES, launcher="torchrun", check=False, timeout=240)
    assert not result.timed_out, result.explain()
    assert result.values == ["TransportError", None, "TransportError", "TransportError"], result.explain()
