"""What a rank sends of its parameters, so that replicas can be compared."""

import pytest
import torch

from dgc.torch.tensors import sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("other", [2, -1, 4, 0])
def test_one_other_value_makes_another_sum_of_bits(dtype, other):
    values = torch.ones(1000, dtype=dtype)
    before = sum_of_bits(values)
    values[700] = other
    assert before != sum_of_bits(values) < 2**52
