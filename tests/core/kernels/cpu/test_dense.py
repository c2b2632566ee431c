"""Sums of squares and the update of dense tensors, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import KINDS, as_type, bits, entries

from dgc.core.kernels.base import MomentumRule
from dgc.core.kernels.cpu import TILE, NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import LayoutError


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 4095, 4097, 32_768, 70_001]), max_size=5),
    kind=st.sampled_from(KINDS),
    element=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_of_squares(lengths, kind, element, seed):
    rng = np.random.default_rng(seed)
    gradients = [as_type(entries(rng, kind, n), element) for n in lengths]
    with np.errstate(all="ignore"):
        expected = ReferenceKernels().sums_of_squares(gradients)
    alone, together = NumbaKernels(1).sums_of_squares(gradients), NumbaKernels(2).sums_of_squares(gradients)
    np.testing.assert_array_equal(alone, together)
    np.testing.assert_allclose(alone, expected, rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("n", [0, 1, 1000, 70_001])
def test_dense_update(kernels, dtype, momentum, nesterov, decay, scale, n):
    rng = np.random.default_rng(n)
    mean, u = rng.standard_normal(n).astype(dtype), rng.standard_normal(n).astype(dtype)
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, "scale": scale}
    for element in [dtype, "float16"]:
        parameter = as_type(rng.standard_normal(n), element)
        own_u, expected_u = u.copy(), u.copy()
        result, expected = np.empty(n, dtype), np.empty(n, dtype)
        kernels.dense_update(result, mean, own_u, parameter, MomentumRule(**options))
        ReferenceKernels().dense_update(expected, mean, expected_u, parameter, MomentumRule(**options))
        np.testing.assert_array_equal(bits(result), bits(expected))
        np.testing.assert_array_equal(bits(own_u), bits(expected_u))


def test_dense_update_into_its_own_mean(kernels):
    mean, u = np.arange(10, dtype=np.float32), np.ones(10, np.float32)
    kernels.dense_update(mean, mean, u, None, MomentumRule(momentum=0.5, nesterov=True, scale=2.0))
    velocity = np.arange(10) + 0.5
    np.testing.assert_array_equal(u, velocity)
    np.testing.assert_array_equal(mean, 2 * (np.arange(10) + 0.5 * velocity))


def test_dense_update_refuses_other_lengths(kernels):
    v = np.zeros(10, np.float32)
    with pytest.raises(LayoutError, match="10 elements"):
        kernels.dense_update(v, v[:9], v, None, MomentumRule(momentum=0.5))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_norms_leave_out_what_is_not_finite_in_whichever_tile(dtype):
    kernels = [NumbaKernels(threads) for threads in (1, 2, 3)]
    rng = np.random.default_rng(2)
    lengths = [8 * TILE, 5 * TILE + 17, 4 * TILE - 1, TILE, 5, 0, 12 * TILE + 1]
    gradients = [rng.standard_normal(n).astype(dtype) for n in lengths]
    exact = [float(np.sum(g.astype(np.float64) ** 2)) for g in gradients]
    np.testing.assert_allclose(kernels[0].sums_of_squares(gradients), exact, rtol=1e-12)
    for place in range(TILE // 2, lengths[0], TILE):
        broken = [g.copy() for g in gradients]
        wanted = []
        for g, value in zip(broken, (np.inf, -np.inf, np.nan, np.inf, np.nan, 0, np.nan), strict=True):
            if place < g.size:
                g[place] = value
            wanted.append(float(np.sum(g[np.isfinite(g)].astype(np.float64) ** 2)))
        sums = [k.sums_of_squares(broken) for k in kernels]
        np.testing.assert_allclose(sums[0], wanted, rtol=1e-12)
        for other in sums[1:]:
            np.testing.assert_array_equal(other, sums[0])
