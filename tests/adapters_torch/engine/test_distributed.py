"""dgc's optimizer under torchrun, where neither Horovod nor mpi4py can be imported."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "distributed_cases.py"


@pytest.fixture(scope="module")
def results():
    return run_cases(2, WORKER, launcher="torchrun")


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_under_torchrun(results, name):
    results.check(name)
