"""The examples that reach DDP's communication hook from other libraries: the hook is called, and equals dense."""

import re
from pathlib import Path

import pytest
from launch_tools import REPOSITORY, case_names, run_cases, run_mpi
from rank_jobs import once

WORKER = Path(__file__).parent / "workers" / "recipes_cases.py"


@pytest.fixture(scope="module")
def results():
    return run_cases(2, WORKER, launcher="torchrun")


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_recipe(results, name):
    results.check(name)


@pytest.mark.mpi
@pytest.mark.parametrize("name", once(("ddp", "accelerate", "trainer", "lightning", "fabric")))
def test_the_script_trains(name):
    output = run_mpi(2, REPOSITORY / "examples" / f"{name}_digits.py", launcher="torchrun").stdout
    accuracy, ratio = map(float, re.search(r"accuracy ([\d.]+) %, (\d+) times", output).groups())
    assert accuracy > 85
    assert ratio > 100
    assert len((REPOSITORY / "examples" / f"{name}_digits.py").read_text().splitlines()) < 60
