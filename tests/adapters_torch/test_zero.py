"""The sharded optimizer: on real ranks of Horovod and torch.distributed against the unsharded one."""

import json
from pathlib import Path

import pytest
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import CARRIERS, SIZES, each_case, once

pytest.importorskip("torch")

WORKERS = Path(__file__).parent / "workers"

test_sharding = each_case(WORKERS / "zero_cases.py", {**SIZES, "gloo": CARRIERS["gloo"]})
test_in_distributed_optimizers = each_case(WORKERS / "zero_horovod_cases.py", SIZES)

ONE_PROCESS = """
import horovod.torch as hvd
import torch
from worker_tools import report
import dgc.torch as dgc

hvd.init()
own, other = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
zero, plain = dgc.ZeroRedundancyOptimizer([own], torch.optim.Adam, lr=0.1), torch.optim.Adam([other], lr=0.1)
for step in range(3):
    own.grad = torch.arange(5.0)
    other.grad = torch.arange(5.0)
    zero.step()
    plain.step()
zero.consolidate_state_dict()
plain.load_state_dict(zero.state_dict())
report([torch.equal(own, other), len(plain.state)])
"""


@pytest.mark.mpi
def test_one_process_is_the_plain_optimizer(ranks):
    assert ranks.run(ONE_PROCESS, 1, launcher="single").values == [[True, 1]]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("launcher", once(["mpirun", "torchrun"]))
@pytest.mark.parametrize("compression", once(["none", "dgc"]))
def test_example(ranks, compression, launcher, tmp_path):
    results = tmp_path / "results.json"
    options = ["--compression", compression, "--epochs", "10", "--batch-size", "32", "--json", results]
    # Under torchrun the script initialises torch.distributed, which living ranks have done.
    start = run_mpi if launcher == "torchrun" else lambda n, script, *given, launcher: ranks.run(script, n, *given)
    start(2, REPOSITORY / "examples" / "torch_zero.py", *options, launcher=launcher)
    found = json.loads(results.read_text())
    assert found["replicas_identical"]
    assert found["continues_unsharded"]
    assert found["accuracy"] > 0.6
