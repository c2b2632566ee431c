"""Habits of Horovod scripts, on 2 real ranks: under MPI, and under Gloo, where Horovod carries the bytes."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "habits_cases.py"


@pytest.fixture(scope="module", params=["mpirun", "gloo"])
def cases(ranks, request):
    return ranks(WORKER, 2, launcher=request.param)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_habits(cases, name):
    cases.check(name)
