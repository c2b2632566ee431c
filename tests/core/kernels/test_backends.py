"""What every backend computes, against NumPy's, bit for bit: on one thread, on two, and on a fake device."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fake_device import device, fake_kernels, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import FLAGS, KINDS, LENGTHS, as_type, bits, check_selection, entries, offsets_of

from dgc.core.kernels import device as device_module
from dgc.core.kernels.base import MomentumRule, SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.errors import LayoutError, WireError

GRADIENT_TYPES = ["float32", "float16", "bfloat16", "float64"]


@dataclass(frozen=True)
class Backend:
    """Kernels, and how an array comes there; what they write is in the array that was given."""

    kernels: Any
    put: Any

    def work(self, work):
        return [replace(w, gradient=self.put(w.gradient), parameter=self.put(w.parameter)) for w in work]


@pytest.fixture(scope="module", params=["1 thread", "2 threads", pytest.param("device", marks=needs_compiler)])
def backend(request):
    if request.param != "device":
        yield Backend(NumbaKernels(int(request.param[0])), lambda array: array)
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_module, "SQUARED_AT_ONCE", 4096)
        yield Backend(fake_kernels(), lambda array: None if array is None else device(array))


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


def work_table(rng, lengths, ks, flags, dtypes, kinds):
    offsets, size = offsets_of(lengths)
    work = []
    for n, k, own, dtype, kind, offset in zip(lengths, ks, flags, dtypes, kinds, offsets, strict=True):
        parameter = as_type(entries(rng, "normal", n), dtype) if own.get("weight_decay") else None
        gradient = as_type(entries(rng, kind, n + 1), dtype)[1:]  # not at a multiple of a vector's size
        work.append(SegmentWork(gradient, parameter, offset, n, k, **own))
    return work, size


@st.composite
def tables(draw):
    count = draw(st.integers(0, 6))
    lengths = draw(st.lists(st.sampled_from(LENGTHS), min_size=count, max_size=count))
    ks = [draw(st.one_of(st.integers(0, 5), st.integers(0, n + 3), st.just(max(1, n // 1000)))) for n in lengths]
    each = [draw(st.tuples(st.sampled_from(FLAGS), st.sampled_from(GRADIENT_TYPES))) for _ in lengths]
    kinds = [draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3)) for _ in lengths]
    return lengths, ks, [f for f, _ in each], [d for _, d in each], kinds, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=80, deadline=None)
@given(table=tables())
def test_state_flags_and_selection_equal_the_reference(backend, table):
    lengths, ks, flags, dtypes, kinds, seed = table
    rng = np.random.default_rng(seed)
    reference = ReferenceKernels()
    size = offsets_of(lengths)[1]
    u, v = np.zeros(size + 5, np.float32), np.zeros(size, np.float32)
    expected_u, expected_v = u.copy(), v.copy()
    there, thresholds = (backend.put(u), backend.put(v)), new_thresholds(len(lengths))
    for step in range(3):
        work, _ = work_table(rng, lengths, ks, flags, dtypes, [kind[step] for kind in kinds])
        chosen = backend.kernels.accumulate_and_select(backend.work(work), *there, thresholds)
        nonfinite = reference.accumulate(work, expected_u, expected_v)
        np.testing.assert_array_equal(bits(u), bits(expected_u))
        np.testing.assert_array_equal(bits(v), bits(expected_v))
        assert chosen.nonfinite == nonfinite
        assert chosen.positions.dtype == np.int64
        assert np.all(np.diff(chosen.positions) > 0)
        np.testing.assert_array_equal(chosen.values, v[chosen.positions])
        if not np.isfinite(v).all():
            return  # a residual that overflowed has no order
        for w in work:
            inside = chosen.positions[(chosen.positions >= w.offset) & (chosen.positions < w.offset + w.length)]
            check_selection(v[w.offset : w.offset + w.length], w, inside)
        assert len(chosen.positions) <= sum(min(k, n) for k, n in zip(ks, lengths, strict=True))
        backend.kernels.take_out(*there, chosen.positions, chosen.values * np.float32(0.75), masking=True)
        reference.take_out(expected_u, expected_v, chosen.positions, chosen.values * np.float32(0.75), masking=True)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", GRADIENT_TYPES)
def test_accumulate_equals_the_reference(backend, flags, dtype):
    rng = np.random.default_rng(0)
    lengths = [n for n in LENGTHS if n]
    u, v = rng.standard_normal((2, offsets_of(lengths)[1])).astype(np.float32)
    expected_u, expected_v = u.copy(), v.copy()
    for kind in ("normal", "halves", "huge", "bad"):
        some = len(lengths)
        work, _ = work_table(rng, lengths, [1] * some, [flags] * some, [dtype] * some, [kind] * some)
        nonfinite = ReferenceKernels().accumulate(work, expected_u, expected_v)
        assert backend.kernels.accumulate(backend.work(work), backend.put(u), backend.put(v)) == nonfinite
        np.testing.assert_array_equal(bits(u), bits(expected_u))
        np.testing.assert_array_equal(bits(v), bits(expected_v))


def test_every_float16_and_bfloat16_is_widened_exactly(backend):
    words = np.arange(65536, dtype=np.uint16)
    words = np.concatenate([words, words[5:]])  # the end is widened by other code than the blocks
    for gradient, wide in (
        (words.view(np.float16), words.view(np.float16).astype(np.float32)),
        (words, (words.astype(np.uint32) << np.uint32(16)).view(np.float32)),
    ):
        for n in (len(words), 77):
            u, v = np.zeros((2, n), np.float32)
            work = backend.work([SegmentWork(gradient[-n:], None, 0, n, 0)])
            bad = backend.kernels.accumulate(work, backend.put(u), backend.put(v))
            assert bad == (not np.isfinite(wide[-n:]).all())
            np.testing.assert_array_equal(v, np.where(np.isfinite(wide[-n:]), wide[-n:], 0))


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.ones(200, np.float32)[::2], "strided"),
        (np.ones(401, np.uint8)[1:].view(np.float32), "unaligned"),
        (np.ones((10, 10), np.float32), "shape"),
        (np.ones(99, np.float32), "shape"),
        (np.ones(100, np.int32), "int32"),
        (np.ones(100, ">f4"), "type >f4"),
    ],
)
def test_arrays_that_a_kernel_cannot_read_are_refused(backend, gradient, message):
    u, v = np.zeros((2, 112), np.float32)
    work = backend.work([SegmentWork(gradient, None, 0, 100, 1)])
    with pytest.raises(LayoutError, match=message):
        backend.kernels.accumulate(work, backend.put(u), backend.put(v))
    np.testing.assert_array_equal(v, 0)


def test_state_and_segments_that_do_not_fit_are_refused(backend):
    g, zeros = np.ones(100, np.float32), np.zeros(200, np.float32)
    for work, u, v, message in (
        (SegmentWork(g, None, 1, 100, 1), zeros[:100], zeros[:100], "does not fit"),
        (SegmentWork(g, np.ones(100, np.int64), 0, 100, 1, weight_decay=0.1), zeros, zeros, "int64"),
        (SegmentWork(g, None, 0, 100, 1), np.zeros(100), zeros, "float64"),
        (SegmentWork(g, None, 0, 100, 1), zeros, zeros[::2], "contiguous"),
    ):
        with pytest.raises(LayoutError, match=message):
            backend.kernels.accumulate(backend.work([work]), backend.put(u.copy()), backend.put(v))
    work, state = backend.work([SegmentWork(g, None, 0, 100, 1)]), (backend.put(zeros), backend.put(zeros.copy()))
    with pytest.raises(LayoutError, match="thresholds"):
        backend.kernels.accumulate_and_select(work, *state, np.zeros((2, 6)))


# -- selected places ---------------------------------------------------------------------------------------------------

PLACED = [1, 15, 16, 1000, 0, 5000, 70_000]


def some_positions(rng, k):
    offsets, size = offsets_of(PLACED)
    valid = np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, PLACED, strict=True)])
    return np.sort(rng.choice(valid, k, replace=False)), np.array([*offsets, size]), size


@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
@pytest.mark.parametrize("masking", [True, False])
def test_take_out(backend, k, masking):
    rng = np.random.default_rng(k)
    positions, _, size = some_positions(rng, k)
    u, v = rng.standard_normal(size + 3).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    decoded = v[positions] * np.float32(0.9)
    expected_u, expected_v = u.copy(), v.copy()
    backend.kernels.take_out(backend.put(u), backend.put(v), positions, decoded, masking=masking)
    ReferenceKernels().take_out(expected_u, expected_v, positions, decoded, masking=masking)
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
def test_set_entries(backend, k, dtype):
    if dtype == "float64" and not backend.kernels.on_device:
        pytest.skip("on a CPU, entries are float32")
    rng = np.random.default_rng(k)
    positions, offsets, _ = some_positions(rng, k)
    values = rng.standard_normal(k).astype(dtype)
    results = [rng.standard_normal(n).astype(dtype) for n in PLACED]
    expected = [r.copy() for r in results]
    backend.kernels.set_entries(list(map(backend.put, results)), offsets, positions, values)
    ReferenceKernels().set_entries(expected, offsets, positions, values)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(bits(result), bits(wanted))


def test_set_entries_refuses_padding(backend):
    after = np.zeros(16, np.float32)
    for results, offsets, positions in (
        ([], [0], [3]),
        ([np.zeros(5, np.float32)], [0, 16], [2, 5]),
        ([after[:5], after[8:]], [0, 8, 16], [17]),
    ):
        with pytest.raises(WireError, match="padding"):
            backend.kernels.set_entries(
                list(map(backend.put, results)), np.array(offsets), np.array(positions), np.ones(len(positions), "f")
            )
    np.testing.assert_array_equal(after, 0)


@pytest.mark.parametrize(
    ("positions", "count", "message"), [([3, 10], 2, "within"), ([-1, 3], 2, "within"), ([1, 2], 1, "decoded")]
)
def test_places_that_do_not_fit_are_refused(backend, positions, count, message):
    u, v = np.zeros((2, 10), np.float32)
    with pytest.raises(LayoutError, match=message):
        backend.kernels.take_out(
            backend.put(u), backend.put(v), np.array(positions), np.zeros(count, np.float32), masking=True
        )


# -- dense tensors -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 4095, 4097, 32_768, 70_001]), max_size=5),
    kind=st.sampled_from(KINDS),
    element=st.sampled_from(GRADIENT_TYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_of_squares(backend, lengths, kind, element, seed):
    rng = np.random.default_rng(seed)
    gradients = [as_type(entries(rng, kind, n), element) for n in lengths]
    found = backend.kernels.sums_of_squares(list(map(backend.put, gradients)))
    np.testing.assert_allclose(found, ReferenceKernels().sums_of_squares(gradients), rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("n", [0, 1, 1000, 70_001])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense_update(backend, dtype, momentum, nesterov, decay, scale, n):
    rng = np.random.default_rng(n)
    mean, u = rng.standard_normal((2, n)).astype(dtype)
    rule = MomentumRule(momentum=momentum, nesterov=nesterov, weight_decay=decay, scale=scale)
    for element in [dtype, "float16"]:
        parameter = as_type(rng.standard_normal(n), element)
        own_u, expected_u, result, expected = u.copy(), u.copy(), np.empty(n, dtype), np.empty(n, dtype)
        backend.kernels.dense_update(backend.put(result), mean, backend.put(own_u), backend.put(parameter), rule)
        ReferenceKernels().dense_update(expected, mean, expected_u, parameter, rule)
        np.testing.assert_array_equal(bits(result), bits(expected))
        np.testing.assert_array_equal(bits(own_u), bits(expected_u))
