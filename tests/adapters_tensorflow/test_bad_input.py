"""Bad input on 2 real ranks: an error on every rank, never a hang."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "bad_input_cases.py"


@pytest.fixture(scope="module", params=["keras3", "legacy"])
def cases(request):
    legacy = "1" if request.param == "legacy" else "0"
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_USE_LEGACY_KERAS": legacy}
    return run_cases(2, WORKER, launcher="horovodrun", timeout=300, env=environment)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)
