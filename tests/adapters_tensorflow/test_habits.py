"""Optimizers as scripts for plain Keras and dense Horovod use them: equal results on 2 real ranks, in both Kerases."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKERS = Path(__file__).parent / "workers"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FLAVOURS = {"keras3": {"TF_USE_LEGACY_KERAS": "0"}, "legacy": {"TF_USE_LEGACY_KERAS": "1"}}


@pytest.fixture(scope="module", params=FLAVOURS)
def habits(request):
    environment = {**QUIET, **FLAVOURS[request.param]}
    return run_cases(2, WORKERS / "habit_cases.py", launcher="horovodrun", timeout=500, env=environment)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKERS / "habit_cases.py"))
def test_on_two_ranks(habits, name):
    habits.check(name)
