"""Gradients that are found again, on real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "repeated_cases.py"


@pytest.fixture(scope="module")
def cases(ranks):
    return ranks(WORKER, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_repeated(cases, name):
    cases.check(name)
