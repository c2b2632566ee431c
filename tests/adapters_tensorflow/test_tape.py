"""Custom training loops on 2 real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "tape_cases.py"


@pytest.fixture(scope="module")
def cases(ranks):
    return ranks(WORKER, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("name", case_names(WORKER))
def test_on_two_ranks(cases, name):
    cases.check(name)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "name", ["a_tape_equals_dense_across_learning_rate_changes", "a_non_finite_gradient_refuses_the_step_everywhere"]
)
def test_with_gloo_horovods_own_collectives_carry_everything(ranks, name):
    ranks(WORKER, 2, launcher="gloo").check(name)
