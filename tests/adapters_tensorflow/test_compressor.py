"""All compressors in TensorFlow, on 2 real ranks, beside PyTorch in the same processes."""

from pathlib import Path

import pytest
from documented import own_names
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "compressor_cases.py"


@pytest.fixture(scope="module")
def cases(ranks):
    return ranks(WORKER, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("name", [*own_names(), *case_names(WORKER)])
def test_compressors(cases, name):
    cases.check(name)
