"""Ranks that give DGCMomentum different things, on real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "agreement_cases.py"


@pytest.fixture(scope="module", params=[(2, "mpirun"), (3, "mpirun"), (2, "gloo")], ids=lambda p: f"{p[0]} {p[1]}")
def agreement(request, ranks):
    size, launcher = request.param
    return ranks(WORKER, size, launcher=launcher)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_ranks_that_disagree(agreement, name):
    agreement.check(name)
