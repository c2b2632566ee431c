"""PyTorch and TensorFlow give the same results for the same gradients, on 2 real ranks."""

from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "same_core_cases.py"


@pytest.mark.mpi
def test_both_adapters_select_the_same_entries(ranks):
    ranks(WORKER, 2).check("the_same_gradients_select_the_same_indices_and_leave_the_same_residuals")
