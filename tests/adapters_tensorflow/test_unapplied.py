"""A step that was exchanged and not applied, on 2 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "unapplied_cases.py"


@pytest.fixture(scope="module")
def cases():
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return run_cases(2, WORKER, launcher="horovodrun", timeout=400, env=env)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_unapplied_on_two_ranks(cases, name):
    cases.check(name)
