"""What compressed training is equal to, on 2 and 4 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "equality_cases.py"


@pytest.fixture(scope="module", params=[2, 4], ids="{}ranks".format)
def cases(request):
    return run_cases(
        request.param, WORKER, launcher="horovodrun", timeout=400, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    )


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_real_ranks(cases, name):
    cases.check(name)
