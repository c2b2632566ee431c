"""Variables updated by received entries alone, on 2 real ranks, with Keras 3 and with legacy Keras."""

from pathlib import Path

import pytest
from launch_tools import case_names
from rank_jobs import FLAVOURS

WORKER = Path(__file__).parent / "workers" / "sparse_updates_cases.py"


@pytest.fixture(scope="module", params=FLAVOURS)
def cases(request, ranks):
    return ranks(WORKER, 2, env=FLAVOURS[request.param])


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)
