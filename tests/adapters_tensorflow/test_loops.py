"""Custom training loops on 2 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names, run_cases

WORKER = Path(__file__).parent / "workers" / "loop_cases.py"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def cases():
    return run_cases(2, WORKER, launcher="horovodrun", timeout=500, env=QUIET)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)


@pytest.mark.mpi
def test_with_gloo_horovods_own_collectives_carry_everything():
    names = ["a_tape_equals_dense_across_learning_rate_changes", "a_non_finite_gradient_refuses_the_step_everywhere"]
    cases = run_cases(2, WORKER, *names, launcher="gloo", timeout=400, env=QUIET)
    for name in names:
        cases.check(name)
