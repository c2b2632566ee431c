"""A step that was exchanged and not applied, on 2 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names
from rank_jobs import FLAVOURS

WORKER = Path(__file__).parent / "workers" / "unapplied_cases.py"


@pytest.fixture(scope="module")
def cases(ranks):
    return ranks(WORKER, 2, env=FLAVOURS["keras3"])


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_unapplied_on_two_ranks(cases, name):
    cases.check(name)
