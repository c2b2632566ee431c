"""The first moment of Adam and its kin in the compressor."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_jobs import SIZES, each_case

from dgc.core.moment import running_mean

test_on_real_ranks = each_case(Path(__file__).parent / "workers" / "first_moment_cases.py", SIZES)


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.99, 0.999])
def test_u_is_the_first_moment_with_its_bias_corrected(beta1):
    gradients = np.random.default_rng(0).normal(size=400)
    u = 1e9  # of which nothing may be left in the first step
    moment = 0.0
    for t, gradient in enumerate(gradients, 1):
        momentum, gain = running_mean(beta1, t)
        u = momentum * u + gain * gradient
        moment = beta1 * moment + (1 - beta1) * gradient
        assert u == pytest.approx(moment / (1 - beta1**t), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("beta1", "steps"), [*itertools.product([0.5, 0.9], [1, 2, 5, 300])])
def test_it_is_what_torchs_adam_divides_by_the_root_of_the_second(beta1, steps):
    torch.manual_seed(0)
    p = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.Adam([p], lr=1.0, betas=(beta1, 0.0), eps=0.0)  # the second moment is the gradient's square
    u = torch.zeros(8)
    for t in range(1, steps + 1):
        before = p.detach().clone()
        p.grad = torch.randn(8)
        momentum, gain = running_mean(beta1, t)
        u = momentum * u + gain * p.grad
        optimizer.step()
    torch.testing.assert_close((before - p.detach()) * p.grad.abs(), u, rtol=1e-4, atol=1e-4)
