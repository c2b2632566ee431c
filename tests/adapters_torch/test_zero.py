"""The example of a sharded optimizer under each launcher."""

import json

import pytest
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import once


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
