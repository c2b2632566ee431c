"""1-bit SGD against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case


@pytest.mark.parametrize("means", ["column", "row", "tensor"])
def test_onebit_takes_the_means_of_either_sign(means):
    alone = Alone(Case("onebit", {"means": means}), {"w": (6, 4, 2)})
    x = alone.random()
    decoded, _, used = alone.sent(x)
    matrix, read = x[:48].reshape(6, 8), decoded.values[0].reshape(6, 8)
    groups = {
        "column": [(slice(None), c) for c in range(8)],
        "row": [(r, slice(None)) for r in range(6)],
        "tensor": [(slice(None), slice(None))],
    }[means]
    for group in groups:
        part, got = matrix[group], read[group]
        for members in (part >= 0, part < 0):
            np.testing.assert_allclose(got[members], part[members].mean() if members.any() else [], rtol=1e-6)
    assert used == 8 * len(groups) + 8  # 6 bytes of bits, padded to 8
