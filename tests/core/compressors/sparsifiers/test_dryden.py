"""Dryden's shares of either sign against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case


@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_dryden_sends_a_share_of_either_sign_as_its_mean(density):
    alone = Alone(Case("dryden", {"sparsity": 1 - density}), {"w": (8, 10)})
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.uniform(0.1, 1, 60), -rng.uniform(0.1, 1, 20)])
    rng.shuffle(values)
    x = alone.flat({"w": values})
    decoded, count, _ = alone.sent(x)
    up, down = int(60 * density), int(20 * density)
    assert count == up + down
    for sign, k in ((1, up), (-1, down)):
        mine = np.sort(sign * x)[::-1][:k]
        chosen = decoded.positions[np.sign(decoded.values) == sign]
        np.testing.assert_array_equal(np.sort(sign * x[chosen])[::-1], mine)
        np.testing.assert_allclose(decoded.values[np.sign(decoded.values) == sign], sign * mine.mean(), rtol=1e-6)


def test_dryden_with_one_sign_only():
    alone = Alone(Case("dryden"), {"w": (8, 10)})
    decoded, count, _ = alone.sent(alone.flat({"w": np.arange(1, 81)}))
    assert count == 1
    np.testing.assert_array_equal(decoded.positions, [79])
    assert decoded.values[0] == 80
