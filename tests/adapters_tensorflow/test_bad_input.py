"""Bad input on 2 real ranks: an error on every rank, never a hang."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "bad_input_cases.py"


@pytest.fixture(scope="module")
def cases():
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return run_cases(2, WORKER, launcher="horovodrun", timeout=300, env=environment)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)
