"""What the wrappers of TensorFlow offer beside the compressor, on 2 real ranks, with either Keras."""

from pathlib import Path

import pytest
from launch_tools import case_names
from rank_jobs import FLAVOURS

WORKER = Path(__file__).parent / "workers" / "wrappers_cases.py"


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", case_names(WORKER))
def test_wrappers(ranks, name, flavour):
    ranks(WORKER, 2, env=FLAVOURS[flavour]).check(name)
