"""The sharded optimizer: on 2 and 4 real ranks against the unsharded one, and with a rank that has joined."""

import json
from pathlib import Path

import pytest
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import SIZES, each_case, once

pytest.importorskip("torch")

WORKER = Path(__file__).parent / "workers" / "optimizer_cases.py"


test_sharding = each_case(WORKER, SIZES)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "name",
    once(["few_changes_travel_as_entries_and_many_whole", "same_bits_when_trainability_changes", "bucket_views"]),
)
def test_without_mpi(ranks, name):
    """Gloo: everything goes through Horovod's own collectives."""
    ranks(WORKER, 2, launcher="gloo").check(name)


JOINED = """
import horovod.torch as hvd
import torch
from worker_tools import report
from dgc.errors import TransportError
from dgc.torch.zero import ZeroRedundancyOptimizer

hvd.init()
p, q = torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(1000))
zero = ZeroRedundancyOptimizer([p], torch.optim.SGD, lr=0.1)
unwrapped = ZeroRedundancyOptimizer([q], torch.optim.SGD, lr=0.1)
p.grad = torch.zeros(1000)
zero.step()
if hvd.rank() == 0:
    for collective in (
        zero.step,
        zero.consolidate_state_dict,
        lambda: ZeroRedundancyOptimizer([torch.nn.Parameter(torch.zeros(3))], torch.optim.SGD, lr=0.1),
        lambda: hvd.DistributedOptimizer(unwrapped, named_parameters=[("q", q)]),
    ):
        try:
            collective()
        except TransportError as error:
            report(str(error))
hvd.join()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", once(["mpirun", "gloo"]))
def test_a_joined_rank_is_an_error_and_no_hang(ranks, launcher):
    errors = ranks.run(JOINED, 2, launcher=launcher).reports[0]
    assert ["a rank has joined" in error for error in errors] == [True] * 4


WRONG_SET = """
import horovod.torch as hvd
import torch
from worker_tools import report
from dgc.torch.zero import ZeroRedundancyOptimizer, ranks

hvd.init()
ranks._PATIENCE = 0.3
if hvd.rank() == 1:
    try:
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.zeros(3))], torch.optim.SGD, group="even", lr=0.1)
    except TypeError as error:
        report(str(error))
"""


@pytest.mark.mpi
def test_a_rank_that_names_no_set_does_not_wait_for_ranks_of_another():
    assert "give a horovod.torch.ProcessSet" in run_mpi(2, WRONG_SET).values[1]


ONE_PROCESS = """
import horovod.torch as hvd
import torch
from worker_tools import report
from dgc.torch.zero import ZeroRedundancyOptimizer

hvd.init()
own, other = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
zero, plain = ZeroRedundancyOptimizer([own], torch.optim.Adam, lr=0.1), torch.optim.Adam([other], lr=0.1)
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
@pytest.mark.parametrize("compression", once(["dgc", "none"]))
def test_example(ranks, compression, tmp_path):
    results = tmp_path / "results.json"
    example = REPOSITORY / "examples" / "torch_zero.py"
    options = ["--compression", compression, "--epochs", "10", "--batch-size", "32", "--json", results]
    ranks.run(example, 2, *options)
    found = json.loads(results.read_text())
    assert found["replicas_identical"]
    assert found["continues_unsharded"]
    assert found["accuracy"] > 0.6
    assert (found["parameter_bytes_last_step"] < found["parameter_bytes_dense"] / 50) == (compression == "dgc")
