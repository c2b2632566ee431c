"""Numba against the NumPy oracle, bit for bit, over random tables of segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import FLAGS, KINDS, LENGTHS, as_type, bits, check_selection, entries, offsets_of

from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import LayoutError

GRADIENT_TYPES = ["float32", "float16", "bfloat16", "float64"]


@pytest.fixture(scope="module")
def numba_kernels():
    return NumbaKernels(2)


def work_table(rng, lengths, ks, flags, dtypes, kinds):
    offsets, size = offsets_of(lengths)
    work = []
    for n, k, own, dtype, kind, offset in zip(lengths, ks, flags, dtypes, kinds, offsets, strict=True):
        parameter = as_type(entries(rng, "normal", n), dtype) if own.get("weight_decay") else None
        work.append(SegmentWork(as_type(entries(rng, kind, n), dtype), parameter, offset, n, k, **own))
    return work, size


@st.composite
def tables(draw):
    count = draw(st.integers(0, 6))
    lengths = draw(st.lists(st.sampled_from(LENGTHS), min_size=count, max_size=count))
    ks = [draw(st.one_of(st.integers(0, 5), st.integers(0, n + 3), st.just(max(1, n // 1000)))) for n in lengths]
    each = [draw(st.tuples(st.sampled_from(FLAGS), st.sampled_from(GRADIENT_TYPES))) for _ in lengths]
    kinds = [draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3)) for _ in lengths]
    return lengths, ks, [f for f, _ in each], [d for _, d in each], kinds, draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("state", ["float32", "float64"])
@settings(max_examples=80, deadline=None)
@given(table=tables())
def test_state_flags_and_selection_equal_the_reference(numba_kernels, state, table):
    lengths, ks, flags, dtypes, kinds, seed = table
    rng = np.random.default_rng(seed)
    reference = ReferenceKernels()
    size = offsets_of(lengths)[1]
    u, v = np.zeros(size + 5, state), np.zeros(size, state)
    expected_u, expected_v = u.copy(), v.copy()
    thresholds = numba_kernels.new_thresholds(len(lengths))
    for step in range(3):
        work, _ = work_table(rng, lengths, ks, flags, dtypes, [kind[step] for kind in kinds])
        chosen = numba_kernels.accumulate_and_select(work, u, v, thresholds)
        with np.errstate(all="ignore"):
            nonfinite = reference.accumulate(work, expected_u, expected_v)
        np.testing.assert_array_equal(bits(u), bits(expected_u))
        np.testing.assert_array_equal(bits(v), bits(expected_v))
        assert chosen.nonfinite == nonfinite
        assert np.all(np.diff(chosen.positions) > 0)
        np.testing.assert_array_equal(chosen.values, v[chosen.positions])
        if not np.isfinite(v).all():
            return  # a residual that overflowed has no order
        for w in work:
            inside = chosen.positions[(chosen.positions >= w.offset) & (chosen.positions < w.offset + w.length)]
            check_selection(v[w.offset : w.offset + w.length], w, inside)
        assert len(chosen.positions) <= sum(min(k, n) for k, n in zip(ks, lengths, strict=True))
        for kernels, own_u, own_v in ((numba_kernels, u, v), (reference, expected_u, expected_v)):
            kernels.mask(own_u, own_v, chosen.positions, chosen.values * own_v.dtype.type(0.75), masking=True)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", GRADIENT_TYPES)
def test_accumulate_equals_the_reference(numba_kernels, flags, dtype):
    rng = np.random.default_rng(0)
    lengths = [n for n in LENGTHS if n]
    size = offsets_of(lengths)[1]
    u, v = rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    expected_u, expected_v = u.copy(), v.copy()
    for kind in ("normal", "halves", "bad"):
        some = len(lengths)
        work, _ = work_table(rng, lengths, [1] * some, [flags] * some, [dtype] * some, [kind] * some)
        with np.errstate(all="ignore"):
            nonfinite = ReferenceKernels().accumulate(work, expected_u, expected_v)
        assert numba_kernels.accumulate(work, u, v) == nonfinite
        np.testing.assert_array_equal(bits(u), bits(expected_u))
        np.testing.assert_array_equal(bits(v), bits(expected_v))


def test_products_and_sums_are_rounded_one_by_one(numba_kernels):
    # m * u = -(1 - 2**-24)**2 rounds to -(1 - 2**-23); added to g with a single rounding it would leave 2**-48 more.
    n = 1000
    u = np.full(n, -(1 - 2.0**-24), np.float32)
    v = np.zeros(n, np.float32)
    m = float(np.float32(1 - 2.0**-24))
    g = np.full(n, 1 - 2.0**-23, np.float32)
    numba_kernels.accumulate([SegmentWork(g, None, 0, n, 0, momentum=m)], u, v)
    np.testing.assert_array_equal(u, 0)
    u[:] = 0
    p = np.full(n, -(1 - 2.0**-24), np.float32)
    numba_kernels.accumulate([SegmentWork(g, p, 0, n, 0, momentum=0.5, weight_decay=m)], u, v)
    np.testing.assert_array_equal(u, 0)


def test_every_float16_and_bfloat16_is_widened_exactly(numba_kernels):
    words = np.arange(65536, dtype=np.uint16)
    words = np.concatenate([words, words[5:]])  # the end is widened by other code than the blocks
    for gradient, wide in (
        (words.view(np.float16), words.view(np.float16).astype(np.float32)),
        (words, (words.astype(np.uint32) << np.uint32(16)).view(np.float32)),
    ):
        for n in (len(words), 77):
            v = np.zeros(n, np.float32)
            bad = numba_kernels.accumulate([SegmentWork(gradient[-n:], None, 0, n, 0)], v.copy(), v)
            assert bad == (not np.isfinite(wide[-n:]).all())
            np.testing.assert_array_equal(v, np.where(np.isfinite(wide[-n:]), wide[-n:], 0))


@pytest.mark.parametrize("position", [0, 1, 63, 64, 4095, 32767, 32768, 69999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_entry_anywhere_is_met_and_counts_as_zero(numba_kernels, position, value):
    n = 70000
    g = np.ones(n, np.float32)
    g[position] = value
    u, v = np.ones(n, np.float32), np.ones(n, np.float32)
    thresholds = numba_kernels.new_thresholds(1)
    for _ in range(2):  # cold, and with a threshold
        before = v[position], u[position]
        chosen = numba_kernels.accumulate_and_select([SegmentWork(g, None, 0, n, 70, 0.5)], u, v, thresholds)
        assert chosen.nonfinite
        assert np.isfinite(v).all()
        assert u[position] == 0.5 * before[1]
        assert v[position] == before[0] + u[position]
    g[position] = 1
    assert not numba_kernels.accumulate_and_select([SegmentWork(g, None, 0, n, 70, 0.5)], u, v, thresholds).nonfinite


@pytest.mark.parametrize("position", [0, 63, 4095, 69999])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "weight_decay": 0.1}]
)
def test_finite_values_that_add_up_to_infinity_are_met_and_change_nothing(numba_kernels, position, options):
    n = 70000
    largest = np.finfo(np.float32).max
    g, p = np.ones(n, np.float32), np.ones(n, np.float32)
    g[position] = 0.5 * largest
    work = [SegmentWork(g, p if "weight_decay" in options else None, 0, n, 70, **options)]
    u, v = np.ones(n, np.float32), np.ones(n, np.float32)
    v[position] = 0.7 * largest
    expected_u, expected_v = u.copy(), v.copy()
    for before, kernels in (((u, v), numba_kernels), ((expected_u, expected_v), ReferenceKernels())):
        own_u, own_v = before
        chosen = kernels.accumulate_and_select(work, own_u, own_v, kernels.new_thresholds(1))
        assert chosen.nonfinite
        assert np.isfinite(chosen.values).all()
        assert own_v[position] == np.float32(0.7 * largest)
        assert own_u[position] == 1
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)
    assert not np.array_equal(v, np.ones(n))


def test_a_gradient_that_overflows_when_scaled_is_met(numba_kernels):
    n = 100
    g, v = np.full(n, 3e38, np.float32), np.zeros(n, np.float32)
    assert numba_kernels.accumulate([SegmentWork(g, None, 0, n, 0, scale=2.0)], v.copy(), v)
    np.testing.assert_array_equal(v, 0)


def test_padding_between_segments_stays_untouched(numba_kernels):
    lengths = [5, 70, 4097]
    offsets, size = offsets_of(lengths)
    u, v = np.full(size, 7, np.float32), np.full(size, 7, np.float32)
    work = [SegmentWork(np.ones(n, np.float32), None, o, n, n, 0.9) for n, o in zip(lengths, offsets, strict=True)]
    chosen = numba_kernels.accumulate_and_select(work, u, v, numba_kernels.new_thresholds(3))
    inside = np.zeros(size, bool)
    for n, o in zip(lengths, offsets, strict=True):
        inside[o : o + n] = True
    assert np.all(u[~inside] == 7)
    assert np.all(v[~inside] == 7)
    np.testing.assert_array_equal(chosen.positions, np.flatnonzero(inside))


def test_gradients_stay_as_they_are(numba_kernels):
    g = np.array([1, np.nan, 3] * 100, np.float32)
    copy = g.copy()
    g.flags.writeable = False
    v = np.zeros(300, np.float32)
    numba_kernels.accumulate([SegmentWork(g, None, 0, 300, 0, 0.9, scale=2.0)], v.copy(), v)
    np.testing.assert_array_equal(g, copy)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.ones(200, np.float32)[::2], "strided"),
        (np.ones(401, np.uint8)[1:].view(np.float32), "unaligned"),
        (np.ones((10, 10), np.float32), "shape"),
        (np.ones(99, np.float32), "shape"),
        (np.ones(100, np.int32), "int32"),
    ],
)
def test_arrays_that_a_kernel_cannot_read_are_refused(numba_kernels, gradient, message):
    v = np.zeros(112, np.float32)
    with pytest.raises(LayoutError, match=message):
        numba_kernels.accumulate([SegmentWork(gradient, None, 0, 100, 1)], v.copy(), v)
    np.testing.assert_array_equal(v, 0)


def test_state_and_segments_that_do_not_fit_are_refused(numba_kernels):
    g, v = np.ones(100, np.float32), np.zeros(100, np.float32)
    with pytest.raises(LayoutError, match="does not fit"):
        numba_kernels.accumulate([SegmentWork(g, None, 1, 100, 1)], v.copy(), v)
    with pytest.raises(LayoutError, match="float64"):
        numba_kernels.accumulate([SegmentWork(g, None, 0, 100, 1)], v.astype(np.float64), v)
    with pytest.raises(LayoutError, match="contiguous"):
        numba_kernels.accumulate(
            [SegmentWork(g, None, 0, 100, 1)], np.zeros(200, np.float32), np.zeros(200, np.float32)[::2]
        )
    with pytest.raises(LayoutError, match="thresholds"):
        numba_kernels.accumulate_and_select([SegmentWork(g, None, 0, 100, 1)], v.copy(), v, np.zeros((2, 6)))
