"""Ranks whose parameters differ although no step failed: what the sharded optimizer makes of them."""

from pathlib import Path

import pytest
from launch_tools import case_names

pytest.importorskip("torch")

WORKER = Path(__file__).parent / "workers" / "sharing_cases.py"


@pytest.fixture(scope="module", params=[2, 4], ids="{}ranks".format)
def cases(request, ranks):
    return ranks(WORKER, request.param)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_replicas_that_differ(cases, name):
    cases.check(name)
