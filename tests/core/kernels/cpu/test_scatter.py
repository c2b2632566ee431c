"""Work at the selected positions, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import bits, offsets_of

from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import LayoutError

LENGTHS = [1, 15, 16, 1000, 0, 5000, 70_000]


def some_positions(rng, k):
    offsets, size = offsets_of(LENGTHS)
    valid = np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, LENGTHS, strict=True)])
    return np.sort(rng.choice(valid, k, replace=False)), np.array([*offsets, size]), size


@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
@pytest.mark.parametrize("masking", [True, False])
def test_mask(kernels, dtype, k, masking):
    rng = np.random.default_rng(k)
    positions, _, size = some_positions(rng, k)
    u, v = rng.standard_normal(size + 3).astype(dtype), rng.standard_normal(size).astype(dtype)
    decoded = v[positions] * v.dtype.type(0.9)
    expected_u, expected_v = u.copy(), v.copy()
    kernels.mask(u, v, positions, decoded, masking=masking)
    ReferenceKernels().mask(expected_u, expected_v, positions, decoded, masking=masking)
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)


@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scatter_add(kernels, dtype, k, factor):
    rng = np.random.default_rng(k)
    positions, offsets, _ = some_positions(rng, k)
    values = rng.standard_normal(k).astype("float32" if dtype == "float32" else "float64")
    results = [rng.standard_normal(n).astype(dtype) for n in LENGTHS]
    expected = [r.copy() for r in results]
    for _ in range(2):
        kernels.scatter_add(results, offsets, positions, values, factor)
        ReferenceKernels().scatter_add(expected, offsets, positions, values, factor)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(bits(result), bits(wanted))


def test_scatter_add_refuses_padding(kernels):
    with pytest.raises(LayoutError, match="padding"):
        kernels.scatter_add([np.zeros(5, np.float32)], np.array([0, 16]), np.array([2, 5]), np.ones(2, np.float32), 1.0)
    after = np.zeros(16, np.float32)
    with pytest.raises(LayoutError, match="padding"):
        kernels.scatter_add([after[:5], after[8:]], np.array([0, 8, 16]), np.array([17]), np.ones(1, np.float32), 1.0)
    np.testing.assert_array_equal(after, 0)


def test_places_outside_are_refused(kernels):
    v = np.zeros(10, np.float32)
    for positions in (np.array([3, 10]), np.array([-1, 3])):
        with pytest.raises(LayoutError, match="within"):
            kernels.mask(v.copy(), v, positions, np.zeros(2, np.float32), masking=True)
