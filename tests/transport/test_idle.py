"""The edits that let Horovod's thread idle: it asks less often, and what ranks hand in is answered as ever."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKERS = Path(__file__).parent / "workers"
CYCLES, COLLECTIVES = WORKERS / "idle_cycles_cases.py", WORKERS / "idle_collectives_cases.py"


@pytest.mark.mpi
def test_ranks_that_idle_ask_less_often(ranks):
    ranks(CYCLES, 2).check("ranks_that_idle_ask_less_often")


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", case_names(COLLECTIVES))
def test_idle_collectives(ranks, size, name):
    ranks(COLLECTIVES, size).check(name)
