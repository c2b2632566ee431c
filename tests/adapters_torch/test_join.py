"""``dgc.torch.join``: ranks with different numbers of batches, under Horovod and torch.distributed."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_mpi
from rank_jobs import CARRIERS, SIZES, each_case, once

WORKER = Path(__file__).parent / "workers" / "join_cases.py"
KINDS = {**SIZES, "gloo": CARRIERS["gloo"]}

test_join = each_case(WORKER, KINDS)
test_beside_horovods = each_case(WORKER.with_name("horovod_join_cases.py"), KINDS)


@pytest.mark.mpi
@pytest.mark.parametrize("name", once(case_names(WORKER)))
def test_under_torchrun(ranks, name):
    ranks(WORKER, 2, launcher="torchrun").check(name)


ALONE = """
import os, signal
import torch
from worker_tools import report
import dgc.torch as dgc

if {torchrun}:
    import torch.distributed as ranks
    ranks.init_process_group("gloo")
    rank = ranks.get_rank()
else:
    import horovod.torch as hvd
    hvd.init()
    rank = hvd.rank()
torch.manual_seed(0)
model = torch.nn.Linear(20, 64)
compression = dgc.Compression.dgc(sparsity=0.9)
optimizer = dgc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 20)).pow(2).sum().backward()
        optimizer.step()

train(2 + rank)
try:
    if {joins}:
        dgc.join(compression)
    if rank == 0:
        {then}
except Exception as error:
    report([type(error).__name__, str(error)])
    raise SystemExit(3)
report("no error")
"""
MISTAKES = {"a joined rank trains on": ("True", "train(2)"), "a rank does not join": ("rank == 0", "pass")}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "mistake"),
    [
        ("torchrun", "a joined rank trains on"),
        ("gloo", "a rank does not join"),
        *(pytest.param(each, "a joined rank trains on", marks=pytest.mark.matrix) for each in ("horovodrun", "gloo")),
        *(pytest.param(each, "a rank does not join", marks=pytest.mark.matrix) for each in ("horovodrun", "torchrun")),
    ],
)
def test_a_rank_alone_gets_an_error(launcher, mistake):
    joins, then = MISTAKES[mistake]
    source = ALONE.format(torchrun=launcher == "torchrun", joins=joins, then=then)
    result = run_mpi(2, source, launcher=launcher, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    name, text = result.values[0]
    assert name in ("TransportError", "StallError", "RemoteError", "HorovodInternalError"), text


@pytest.mark.mpi
@pytest.mark.matrix
@pytest.mark.parametrize("launcher", ["horovodrun", "gloo", "torchrun"])
def test_a_rank_that_is_killed_ends_the_job(launcher):
    killed = "rank == 0 or os.kill(os.getpid(), signal.SIGKILL)"
    source = ALONE.format(torchrun=launcher == "torchrun", joins=killed, then="pass")
    result = run_mpi(2, source, launcher=launcher, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0, result.explain()
    assert "no error" not in result.values
