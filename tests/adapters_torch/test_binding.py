"""Before, while and after a compressor is bound, on 2 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "binding_cases.py"


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_binding(ranks, name):
    ranks(WORKER, 2).check(name)
