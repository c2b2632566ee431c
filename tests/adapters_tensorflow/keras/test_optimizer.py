"""Keras' fit on 2 real ranks, with Keras 3 and with legacy Keras."""

from pathlib import Path

import pytest
from launch_tools import case_names
from rank_jobs import FLAVOURS

WORKERS = Path(__file__).parent / "workers"


@pytest.fixture(scope="module", params=FLAVOURS)
def cases(request, ranks):
    return ranks(WORKERS / "optimizer_cases.py", 2, env=FLAVOURS[request.param])


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKERS / "optimizer_cases.py"))
def test_on_two_ranks(cases, name):
    cases.check(name)


@pytest.fixture(scope="module", params=FLAVOURS)
def mixed(request, ranks):
    return ranks(WORKERS / "mixed_precision_cases.py", 2, env=FLAVOURS[request.param])


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKERS / "mixed_precision_cases.py"))
def test_mixed_precision_on_two_ranks(mixed, name):
    mixed.check(name)
