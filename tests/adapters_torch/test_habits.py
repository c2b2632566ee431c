"""Habits of Horovod scripts, on 2 real ranks: under MPI, and under Gloo, where Horovod carries the bytes."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "habit_cases.py"


@pytest.fixture(scope="module", params=["mpirun", "gloo"])
def cases(request):
    return run_cases(2, WORKER, launcher=request.param, timeout=400)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_habits(cases, name):
    cases.check(name)
