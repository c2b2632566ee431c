"""Keras' fit on 2 real ranks, with Keras 3 and with legacy Keras."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKERS = Path(__file__).parent / "workers"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FLAVOURS = {"keras3": {"TF_USE_LEGACY_KERAS": "0"}, "legacy": {"TF_USE_LEGACY_KERAS": "1"}}


@pytest.fixture(scope="module", params=FLAVOURS)
def cases(request):
    environment = {**QUIET, **FLAVOURS[request.param]}
    return run_cases(2, WORKERS / "keras_cases.py", launcher="horovodrun", timeout=500, env=environment)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKERS / "keras_cases.py"))
def test_on_two_ranks(cases, name):
    cases.check(name)


@pytest.fixture(scope="module", params=FLAVOURS)
def mixed(request):
    environment = {**QUIET, **FLAVOURS[request.param]}
    return run_cases(2, WORKERS / "mixed_cases.py", launcher="horovodrun", timeout=200, env=environment)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKERS / "mixed_cases.py"))
def test_mixed_precision_on_two_ranks(mixed, name):
    mixed.check(name)
