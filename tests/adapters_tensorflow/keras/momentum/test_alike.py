"""DGCMomentum of PyTorch and of TensorFlow on the same gradients, on real ranks."""

from pathlib import Path

import pytest
from launch_tools import case_names

WORKER = Path(__file__).parent / "workers" / "alike_cases.py"


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", case_names(WORKER))
def test_pytorch_and_tensorflow_give_the_same_parameters(ranks, size, name):
    ranks(WORKER, size).check(name)
