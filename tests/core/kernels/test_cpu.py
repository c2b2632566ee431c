"""The CPU kernels against the NumPy oracle, bit for bit; one after the other, overlapping, and on several threads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import FLAGS, KINDS, LENGTHS, as_type, bits, check_selection, entries, offsets_of

from dgc.core.kernels.base import MomentumRule, SegmentWork
from dgc.core.kernels.cpu import TILE, NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.errors import LayoutError, WireError

GRADIENT_TYPES = ["float32", "float16", "bfloat16", "float64"]


@pytest.fixture(scope="module")
def numba_kernels():
    return NumbaKernels(2)


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    return NumbaKernels(request.param)


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
def test_state_flags_and_selection_equal_the_reference(numba_kernels, table):
    lengths, ks, flags, dtypes, kinds, seed = table
    rng = np.random.default_rng(seed)
    reference = ReferenceKernels()
    size = offsets_of(lengths)[1]
    u, v = np.zeros(size + 5, np.float32), np.zeros(size, np.float32)
    expected_u, expected_v = u.copy(), v.copy()
    thresholds = new_thresholds(len(lengths))
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
            kernels.take_out(own_u, own_v, chosen.positions, chosen.values * np.float32(0.75), masking=True)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", GRADIENT_TYPES)
def test_accumulate_equals_the_reference(numba_kernels, flags, dtype):
    rng = np.random.default_rng(0)
    lengths = [n for n in LENGTHS if n]
    size = offsets_of(lengths)[1]
    u, v = rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    expected_u, expected_v = u.copy(), v.copy()
    for kind in ("normal", "halves", "huge", "bad"):
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
    thresholds = new_thresholds(1)
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
        chosen = kernels.accumulate_and_select(work, own_u, own_v, new_thresholds(1))
        assert chosen.nonfinite
        assert np.isfinite(chosen.values).all()
        assert own_v[position] == np.float32(0.7 * largest)
        assert own_u[position] == 1
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)
    assert not np.array_equal(v, np.ones(n))


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
        (np.ones(100, ">f4"), "type >f4"),
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1000, 6001, 262_151])
@pytest.mark.parametrize("broken", ["inf", "nan", "largest nan"])
@pytest.mark.parametrize("share", [0.0005, 0.1, 1.0])
def test_what_is_not_finite_in_a_residual_comes_first(threads, size, broken, share):
    rng = np.random.default_rng(0)
    v = rng.standard_normal(size).astype(np.float32)
    bad = np.sort(rng.choice(size, max(1, int(size * share)), replace=False))
    if broken == "largest nan":
        v.view(np.uint32)[bad] = 0x7FFFFFFF
    else:
        v[bad] = np.inf if broken == "inf" else np.nan
    kernels, k = NumbaKernels(threads), max(1, size // 100)
    u, thresholds, zeros = np.zeros(size, np.float32), new_thresholds(1), np.zeros(size, np.float32)
    for _ in range(3):
        before = v.copy()
        chosen = kernels.accumulate_and_select([SegmentWork(zeros, None, 0, size, k, 0.9)], u, v, thresholds)
        positions = chosen.positions
        assert len(positions) <= k
        assert np.all(np.diff(positions) > 0)
        assert positions.size == 0 or (positions[0] >= 0 and positions[-1] < size)
        np.testing.assert_array_equal(chosen.values, before[positions])
        if len(bad) >= k:
            assert np.isin(positions, bad).all()
        else:
            assert np.isin(bad, positions).all()


# -- selected places ---------------------------------------------------------------------------------------------------

PLACED = [1, 15, 16, 1000, 0, 5000, 70_000]


def some_positions(rng, k):
    offsets, size = offsets_of(PLACED)
    valid = np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, PLACED, strict=True)])
    return np.sort(rng.choice(valid, k, replace=False)), np.array([*offsets, size]), size


@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
@pytest.mark.parametrize("masking", [True, False])
def test_mask(kernels, k, masking):
    rng = np.random.default_rng(k)
    positions, _, size = some_positions(rng, k)
    u, v = rng.standard_normal(size + 3).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    decoded = v[positions] * np.float32(0.9)
    expected_u, expected_v = u.copy(), v.copy()
    kernels.take_out(u, v, positions, decoded, masking=masking)
    ReferenceKernels().take_out(expected_u, expected_v, positions, decoded, masking=masking)
    np.testing.assert_array_equal(u, expected_u)
    np.testing.assert_array_equal(v, expected_v)


@pytest.mark.parametrize("k", [0, 1, 500, 20_000])
def test_set_entries(kernels, k):
    rng = np.random.default_rng(k)
    positions, offsets, _ = some_positions(rng, k)
    values = rng.standard_normal(k).astype(np.float32)
    results = [rng.standard_normal(n).astype(np.float32) for n in PLACED]
    expected = [r.copy() for r in results]
    kernels.set_entries(results, offsets, positions, values)
    ReferenceKernels().set_entries(expected, offsets, positions, values)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(bits(result), bits(wanted))


def test_set_entries_refuses_padding(kernels):
    with pytest.raises(WireError, match="padding"):
        kernels.set_entries([], np.array([0]), np.array([3]), np.ones(1, np.float32))
    with pytest.raises(WireError, match="padding"):
        kernels.set_entries([np.zeros(5, np.float32)], np.array([0, 16]), np.array([2, 5]), np.ones(2, np.float32))
    after = np.zeros(16, np.float32)
    with pytest.raises(WireError, match="padding"):
        kernels.set_entries([after[:5], after[8:]], np.array([0, 8, 16]), np.array([17]), np.ones(1, np.float32))
    np.testing.assert_array_equal(after, 0)


def test_places_outside_are_refused(kernels):
    v = np.zeros(10, np.float32)
    for positions in (np.array([3, 10]), np.array([-1, 3])):
        with pytest.raises(LayoutError, match="within"):
            kernels.take_out(v.copy(), v, positions, np.zeros(2, np.float32), masking=True)


# -- dense tensors -----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("dtype", ["float32", "float64"])
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


def test_a_norm_beyond_float64_is_infinite():
    assert NumbaKernels(1).sums_of_squares([np.full(3 * TILE, 7e151)]) == np.inf


# -- passes that other threads begin with ------------------------------------------------------------------------------

SEGMENTS = (200_000, 131_072, 70_000, 3)
K = 400


class Buckets:
    """Four buckets of one rank, with gradients that depend on the step alone."""

    def __init__(self, kernels):
        self.kernels = kernels
        size = sum(SEGMENTS)
        self.states = [(np.zeros(size, np.float32), np.zeros(size, np.float32)) for _ in range(4)]
        self.thresholds = [new_thresholds(len(SEGMENTS)) for _ in self.states]
        self.sent = []

    def work(self, step, bucket):
        rng = np.random.default_rng((step, bucket))
        offsets = np.cumsum((0, *SEGMENTS))
        gradients = [rng.standard_normal(n, dtype=np.float32) for n in SEGMENTS]
        return [
            SegmentWork(g, None, int(offset), g.size, min(K, g.size), 0.9)
            for g, offset in zip(gradients, offsets[:-1], strict=True)
        ]

    def in_turn(self, step):
        for b, (u, v) in enumerate(self.states):
            chosen = self.kernels.accumulate_and_select(self.work(step, b), u, v, self.thresholds[b])
            self.kernels.take_out(u, v, chosen.positions, np.float32(0.5) * chosen.values, masking=True)
            self.sent.append((chosen.positions, chosen.values))

    def overlapping(self, step):
        def begin(b):
            return self.kernels.begin_selection(self.work(step, b), *self.states[b], self.thresholds[b])

        last = len(self.states) - 1
        under_way = begin(0)
        for b, (u, v) in enumerate(self.states):
            following = begin(b + 1) if b < last else None
            chosen = under_way()
            under_way = following
            half = np.float32(0.5) * chosen.values
            self.kernels.take_out(u, v, chosen.positions, half, masking=True)
            self.sent.append((chosen.positions, chosen.values))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_overlapping_buckets_equal_buckets_in_turn(threads):
    wanted, got = Buckets(NumbaKernels(1)), Buckets(NumbaKernels(threads))
    assert got.kernels.overlaps == (threads > 1)
    for step in range(8):
        wanted.in_turn(step)
        got.overlapping(step)
        for a, b in zip(wanted.states, got.states, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(wanted.sent, got.sent, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])


def test_results_that_cannot_be_written_are_refused():
    kernels, one = NumbaKernels(1), np.ones(1, np.float32)
    result = np.zeros(4, np.float32)
    result.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        kernels.set_entries([result], np.array([0, 4]), np.array([3]), one)
    half = np.zeros(4, np.float16)
    with pytest.raises(LayoutError, match="float16"):
        kernels.dense_update(half, half, half, None, MomentumRule(momentum=0.9))
