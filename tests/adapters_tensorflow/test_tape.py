"""Custom training loops on 2 real ranks."""

from pathlib import Path

import pytest
from rank_jobs import each_case

WORKER = Path(__file__).parent / "workers" / "tape_cases.py"


test_on_two_ranks = each_case(WORKER)


@pytest.mark.mpi
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["a_non_finite_gradient_refuses_the_step_everywhere", "a_tape_equals_dense_across_learning_rate_changes"]
)
def test_with_gloo_horovods_own_collectives_carry_everything(ranks, name):
    ranks(WORKER, 2, launcher="gloo").check(name)
