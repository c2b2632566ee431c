"""Parameters updated by received entries alone, on 2 and 4 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "sparse_updates_cases.py"


@pytest.fixture(scope="module", params=[2, 4], ids="{}ranks".format)
def cases(request, ranks):
    return ranks(WORKER, request.param)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_real_ranks(cases, name):
    cases.check(name)
