"""The first moment of Adam and its kin in the compressor."""

import numpy as np
import pytest

from dgc.core.config import STEPS_BEFORE, running_mean


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.99, 0.999])
def test_u_is_the_first_moment_with_its_bias_corrected(beta1):
    gradients = np.random.default_rng(0).normal(size=400)
    u = moment = 0.0
    for t, gradient in enumerate(gradients, 1):
        momentum, gain = running_mean(beta1, t)
        u = momentum * u + gain * gradient
        moment = beta1 * moment + (1 - beta1) * gradient
        assert u == pytest.approx(moment / (1 - beta1 ** (t + STEPS_BEFORE)), rel=1e-6, abs=1e-9)
