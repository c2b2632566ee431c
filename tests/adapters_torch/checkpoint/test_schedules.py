"""Learning-rate and momentum schedules across a checkpoint, on real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "schedules_cases.py"


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_schedules(ranks, name):
    ranks(WORKER, 2).check(name)
