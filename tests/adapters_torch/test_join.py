"""``dgc.torch.join``: ranks with different numbers of batches, under Horovod and torch.distributed."""

import itertools
import re
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
MISTAKES = {
    "a joined rank trains on": ("True", "train(2)"),
    "a rank does not join": ("rank == 0", "pass"),
    "a rank is killed": ("rank == 0 or os.kill(os.getpid(), signal.SIGKILL)", "pass"),
}
AT_ONCE = ("torchrun", "a joined rank trains on"), ("gloo", "a rank does not join")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "mistake"),
    [
        pytest.param(*both, marks=[] if both in AT_ONCE else pytest.mark.matrix)
        for both in itertools.product(("torchrun", "gloo", "horovodrun"), MISTAKES)
    ],
)
def test_a_rank_alone_ends_the_job_with_an_error(launcher, mistake):
    joins, then = MISTAKES[mistake]
    source = ALONE.format(torchrun=launcher == "torchrun", joins=joins, then=then)
    result = run_mpi(2, source, launcher=launcher, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0, result.explain()
    if mistake == "a rank is killed":  # the launcher may end the other one before its error
        assert "no error" not in result.values
    else:
        name, text = result.values[0]
        assert name in ("TransportError", "StallError", "RemoteError", "HorovodInternalError"), text


BY_HOROVOD = """
import horovod.torch as hvd, torch
from adapters_torch.workers.models import make_model, train, wrap
from worker_tools import report
import dgc.torch as dgc

hvd.init()
model = make_model()
optimizer, compression = wrap({way!r}, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sparsity=0.9)
train(optimizer, model, 2)
try:
    if hvd.rank() == 1:
        hvd.join()
    train(optimizer, model, 1, start=2)
except Exception as error:
    report([type(error).__name__, str(error)])
    raise SystemExit(3)
report("no error")
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "launcher"),
    once((way, launcher) for launcher in ("mpirun", "horovodrun", "gloo") for way in "ba"),
)
def test_a_rank_that_joins_by_horovod_ends_the_job_with_an_error(way, launcher):
    source = BY_HOROVOD.format(way=way)
    stall = {} if launcher == "gloo" else {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}  # where MPI carries gradients
    result = run_mpi(2, source, launcher=launcher, env=stall, check=False)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    name, text = result.values[0]
    assert name in ("ConfigError", "TransportError", "StallError", "HorovodInternalError"), text
    assert "hvd.join" in text, result.explain()
    assert re.search(r"dgc\.torch\.join\(compression\)|join\((compression)?\) of dgc\.torch", text), result.explain()
