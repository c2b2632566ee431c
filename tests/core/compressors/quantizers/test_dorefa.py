"""DoReFa against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_dorefa_has_levels_at_odd_multiples(bits):
    alone = Alone(Case("dorefa", {"bits": bits}), {"w": (50, 50)})
    x = alone.random()
    largest, top = np.abs(x).max(), 2**bits - 1
    decoded = alone.roundtrip(x)[:2500]
    numbers = decoded / largest * top
    np.testing.assert_allclose(numbers, 2 * np.round((numbers - 1) / 2) + 1, atol=1e-4)
    assert (np.abs(decoded - x[:2500]) <= 2 * largest / top * 1.0001).all()
    zeros = alone.flat({"w": [1, *[0] * 2499]})
    np.testing.assert_allclose(np.abs(alone.roundtrip(zeros)[1:2500]), 1 / top, rtol=1e-6)
