"""AdaComp's soft threshold against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case


def naive_adacomp(g, dw, length):
    h = g + dw
    tops = [np.abs(g[b : b + length]).max() for b in range(0, g.size, length)]
    scale = np.float32(np.mean(tops))
    positions = [i for i in range(g.size) if tops[i // length] > 0 and g[i] and abs(h[i]) >= tops[i // length]]
    return positions, np.float32([scale * np.sign(g[i]) for i in positions])


@pytest.mark.parametrize(("shape", "length"), [((10, 4, 3, 3), 50), ((40, 33), 500), ((3, 3), 500)])
def test_adacomp_follows_its_soft_threshold(shape, length):
    alone = Alone(Case("adacomp", {"entries_per_bin": 500.0}), {"w": shape})
    rng = np.random.default_rng(2)
    n = int(np.prod(shape))
    for step in range(5):
        x, dw = (alone.flat({"w": rng.standard_normal(n)}) for _ in range(2))
        if step == 1:
            x[: min(n, length)] = 0  # an empty bin
        if step == 2:
            dw = -x  # the gradient opposes the residual: nothing reaches the largest
        decoded, count, _ = alone.sent(x, increment=dw)
        positions, values = naive_adacomp(x[:n], dw[:n], length)
        np.testing.assert_array_equal(decoded.positions, positions)
        np.testing.assert_allclose(decoded.values, values, rtol=1e-6)
        assert count == len(positions)


def test_adacomp_without_room_skips_other_bins_in_other_steps():
    alone = Alone(Case("adacomp", {"conv_bin": 10, "entries_per_bin": 2.0}), {"w": (20, 10, 5)})
    x = alone.flat({"w": np.ones(1000)})
    served = []
    for step in range(40):
        decoded, count, used = alone.sent(x, step=step)
        assert used <= alone.algorithm.max_bytes(alone.spec)
        assert count == decoded.positions.size
        served.append(np.unique(decoded.positions // 10))
    assert all(0 < len(s) < 100 for s in served)
    assert len(np.unique(np.concatenate(served))) > 60
