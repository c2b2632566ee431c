"""TernGrad against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case, train


def test_terngrad_clips_and_shares_its_scaler():
    alone = Alone(Case("terngrad"), {"w": (50, 50)})
    x = alone.random()
    x[7] = 100
    deviation = x[:2500].std(dtype=np.float64)
    assert alone.algorithm.prepare(x, alone.spec)[0] == pytest.approx(2.5 * deviation, rel=1e-5)
    decoded = alone.roundtrip(x, shared=np.array([3.0]))
    assert set(np.unique(decoded)) <= {-3.0, 0.0, 3.0}
    assert (np.sign(decoded) * np.sign(x) >= 0).all()
    draws = np.array([alone.roundtrip(x, step=s, shared=np.array([3.0 * deviation]))[7] for s in range(3000)])
    assert draws.mean() == pytest.approx(2.5 * deviation, rel=0.05)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, -7.7, -0.5])
@pytest.mark.parametrize("size", [10, 1000, 4099])
def test_terngrad_does_not_clip_a_constant(value, size):
    """Rounding leaves a deviation of some 1e-17; clipping to 2.5 of it would send nothing."""
    alone = Alone(Case("terngrad"), {"w": (size, 1)})
    x = alone.flat({"w": value})
    np.testing.assert_array_equal(alone.roundtrip(x), x)


def test_all_ranks_use_the_largest_scaler():
    runs = train(3, 1, Case("terngrad", {"clip_factor": None}), shapes={"w": (40, 40)})
    from contract_tools import gradients

    largest = max(np.abs(gradients(0, r, {"w": (40, 40)})[0]).max() for r in range(3))
    counts = runs[0][0][0][0] * 3 / np.float32(largest)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-5)
    assert np.abs(counts).max() <= 3.0001
