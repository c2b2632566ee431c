"""A step that was synchronized and not applied, on real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "unapplied_cases.py"


@pytest.fixture(scope="module", params=["mpirun", "gloo"])
def cases(ranks, request):
    return ranks(WORKER, 2, launcher=request.param)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_unapplied_on_real_ranks(cases, name):
    cases.check(name)
