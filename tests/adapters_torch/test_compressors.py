"""All compressors in PyTorch, on 2 real ranks."""

from pathlib import Path

import pytest
from documented import own_names
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "compressor_cases.py"


@pytest.fixture(scope="module")
def cases():
    return run_cases(2, WORKER, launcher="horovodrun", timeout=300)


@pytest.mark.mpi
@pytest.mark.parametrize("name", [*own_names(), *case_names(WORKER)])
def test_compressors(cases, name):
    cases.check(name)
