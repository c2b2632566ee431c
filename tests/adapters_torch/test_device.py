"""Training on the tensors of GPUs, on real ranks that share those that there are."""

from pathlib import Path

import pytest
import torch
from rank_jobs import each_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

test_device = each_case(Path(__file__).parent / "workers" / "device_cases.py")
