"""Unusual use on real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "attack_cases.py"


@pytest.fixture(scope="module")
def cases():
    return run_cases(2, WORKER, launcher="horovodrun", timeout=300, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_unusual_use(cases, name):
    cases.check(name)
