"""QSGD against its paper's formula, written down once more and naively."""

import numpy as np
import pytest
from contract_tools import Alone, Case


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_rounds_to_neighbouring_levels_of_each_bucket(norm, bits):
    alone = Alone(Case("qsgd", {"norm": norm, "bits": bits, "bucket_size": 100}), {"w": (10, 33)})
    x, s = alone.random(), 2 ** (bits - 1) - 1
    decoded = alone.roundtrip(x)[:330]
    for start in range(0, 330, 100):
        part, got = x[start : min(start + 100, 330)], decoded[start : start + 100]
        scale = np.linalg.norm(part) if norm == "l2" else np.abs(part).max()
        levels = got / scale * s
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
        assert (np.abs(np.round(levels) - part / scale * s) < 1 + 1e-4).all()
        assert (np.sign(got) * np.sign(part) >= 0).all()


def test_qsgd_has_the_variance_of_the_paper():
    """E ||Q(x) - x||² <= min(d/s², sqrt(d)/s) ||x||², Lemma 3.1."""
    for bits in (2, 4, 8):
        alone = Alone(Case("qsgd", {"bits": bits}), {"w": (16, 32)})
        x, s, d = alone.random(), 2 ** (bits - 1) - 1, 512
        errors = [((alone.roundtrip(x, step=i) - x) ** 2).sum() for i in range(50)]
        assert np.mean(errors) <= 1.05 * min(d / s**2, np.sqrt(d) / s) * (x**2).sum()
        assert np.mean(errors) > 0
