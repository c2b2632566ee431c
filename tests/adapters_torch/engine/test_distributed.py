"""dgc's optimizer under torchrun, where neither Horovod nor mpi4py can be imported."""

import re
from pathlib import Path

import pytest
from launch_tools import REPOSITORY, case_names, run_cases, run_mpi

WORKER = Path(__file__).parent / "workers" / "distributed_cases.py"


@pytest.fixture(scope="module")
def results():
    return run_cases(2, WORKER, launcher="torchrun")


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_under_torchrun(results, name):
    results.check(name)


@pytest.mark.mpi
def test_the_example_trains():
    output = run_mpi(2, REPOSITORY / "examples" / "torchrun_digits.py", "10", launcher="torchrun").stdout
    accuracy, ratio = map(float, re.search(r"accuracy ([\d.]+) %, (\d+) times", output).groups())
    assert accuracy > 85
    assert ratio > 100
