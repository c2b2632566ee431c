"""Work at the selected places, sums of squares and the dense update, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import KINDS, as_type, bits, entries, offsets_of

from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import LayoutError

LENGTHS = [1, 15, 16, 1000, 0, 5000, 70_000]


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    return NumbaKernels(request.param)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def some_positions(rng, k):
    offsets, size = offsets_of(LENGTHS)
    valid = np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, LENGTHS, strict=True)])
    return np.sort(rng.choice(valid, k, replace=False)), np.array([*offsets, size]), size


@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
@pytest.mark.parametrize("masking", [True, False])
def test_take_mask_and_restore(kernels, dtype, k, masking):
    rng = np.random.default_rng(k)
    positions, _, size = some_positions(rng, k)
    u, v = rng.standard_normal(size + 3).astype(dtype), rng.standard_normal(size).astype(dtype)
    decoded = v[positions] * v.dtype.type(0.9)
    expected_u, expected_v = u.copy(), v.copy()
    before_u, before_v = u.copy(), v.copy()
    np.testing.assert_array_equal(kernels.take(v, positions), v[positions])
    undo = kernels.mask(u, v, positions, decoded, masking=masking)
    expected = ReferenceKernels().mask(expected_u, expected_v, positions, decoded, masking=masking)
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)
    np.testing.assert_array_equal(undo.u, expected.u)
    np.testing.assert_array_equal(undo.v, expected.v)
    kernels.restore(u, v, undo)
    np.testing.assert_array_equal(u, before_u)
    np.testing.assert_array_equal(v, before_v)


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
            kernels.take(v, positions)
        with pytest.raises(LayoutError, match="within"):
            kernels.mask(v.copy(), v, positions, np.zeros(2, np.float32), masking=True)


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
        kernels.dense_update(result, mean, own_u, parameter, **options)
        ReferenceKernels().dense_update(expected, mean, expected_u, parameter, **options)
        np.testing.assert_array_equal(bits(result), bits(expected))
        np.testing.assert_array_equal(bits(own_u), bits(expected_u))


def test_dense_update_into_its_own_mean(kernels):
    mean, u = np.arange(10, dtype=np.float32), np.ones(10, np.float32)
    kernels.dense_update(mean, mean, u, None, momentum=0.5, nesterov=True, weight_decay=0.0, scale=2.0)
    velocity = np.arange(10) + 0.5
    np.testing.assert_array_equal(u, velocity)
    np.testing.assert_array_equal(mean, 2 * (np.arange(10) + 0.5 * velocity))


def test_dense_update_refuses_other_lengths(kernels):
    v = np.zeros(10, np.float32)
    with pytest.raises(LayoutError, match="10 elements"):
        kernels.dense_update(v, v[:9], v, None, momentum=0.5, nesterov=False, weight_decay=0.0, scale=1.0)
