"""The device kernels on a fake device: the reference's bits, the CPU backend's thresholds, launches and waits."""

import numpy as np
import pytest
from device_tools import Bucket, assert_same_selection, same_bits
from fake_device import counts, device, fake_kernels, host, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import KINDS, as_type, entries

from dgc.core.kernels import device as device_module
from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import MomentumRule, SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.errors import LayoutError, WireError

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


def bucket_of(lengths):
    return Bucket(lengths, fake_kernels(), lambda a: device(np.array(a)), host)


def select(bucket, gradients, parameters, options):
    mine, theirs = bucket.work(gradients, parameters, options)
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
    return got, theirs


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.sampled_from([0, 1, 3, 31, 1000, 4095, 4096, 4097, 9001]), min_size=1, max_size=4),
    density=st.sampled_from([0.001, 0.01, 0.2, 1.0]),
    pattern=st.sampled_from(KINDS),
    kind=st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 1e-2]),
)
def test_a_first_step_equals_the_reference(seed, lengths, density, pattern, kind, momentum, nesterov, decay):
    rng = np.random.default_rng(seed)
    bucket = bucket_of(lengths)
    gradients = [as_type(entries(rng, pattern, n), kind) for n in lengths]
    parameters = [as_type(rng.standard_normal(n), kind) for n in lengths] if decay else None
    options = [
        dict(k=max(1, int(n * density)), momentum=momentum, nesterov=nesterov, weight_decay=decay, scale=0.37)
        for n in lengths
    ]
    got, theirs = select(bucket, gradients, parameters, options)
    wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    bucket.assert_same_state()
    assert got.nonfinite == wanted.nonfinite
    assert_same_selection(got, wanted)


def test_candidates_entries_and_thresholds_equal_the_cpu_backends():
    """Over steps with a jump and a fall; a segment is longer than a chunk of the CPU's, one has a high density."""
    cpu = NumbaKernels(1)
    rng = np.random.default_rng(5)
    lengths, ks = [300000, 3000, 12000, 50000], [60, 30, 12, 5000]
    bucket = bucket_of(lengths)
    u, v, thresholds = bucket.u.copy(), bucket.v.copy(), new_thresholds(4)
    for step in range(12):
        scale = {6: 100.0, 9: 0.0}.get(step, 1.0)
        gradients = [(entries(rng, "heavy", n) * scale).astype(np.float32) for n in lengths]
        got, theirs = select(bucket, gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        wanted = cpu.accumulate_and_select(theirs, u, v, thresholds)
        assert_same_selection(got, wanted)
        same_bits(bucket.thresholds, thresholds)
        bucket.kernels.take_out(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        cpu.take_out(u, v, wanted.positions, wanted.values, masking=True)
        same_bits(host(bucket.device_v), v)
        same_bits(host(bucket.device_u), u)


@pytest.mark.parametrize("extra", [-20, -3, -1, 0, 1, 2, 500, 5000])
def test_just_enough_candidates_too_few_and_too_many(extra):
    cpu, n, k = NumbaKernels(1), 20000, 64
    magnitudes = np.linspace(0.5, 2.0, n, dtype=np.float32)
    gradient = np.random.default_rng(0).permutation(magnitudes) * np.float32(-1)
    bucket, thresholds = bucket_of([n]), new_thresholds(1)
    for each in (bucket.thresholds, thresholds):
        cpu.accumulate_and_select(
            [SegmentWork(gradient, None, 0, n, k)], np.zeros(n, np.float32), np.zeros(n, np.float32), each
        )
        each[0, rules.NEXT] = np.sort(magnitudes)[n - k - extra]
    got, theirs = select(bucket, [gradient], None, dict(k=k))
    wanted = cpu.accumulate_and_select(theirs, bucket.u, bucket.v, thresholds)
    assert_same_selection(got, wanted)
    same_bits(bucket.thresholds, thresholds)


def test_candidates_beyond_their_room_are_counted_and_not_kept():
    """A threshold that has become far too low in one segment: the others' candidates are all there."""
    lengths, ks = [50000, 50000, 2000], [40, 40, 20]
    bucket, cpu = bucket_of(lengths), NumbaKernels(1)
    rng = np.random.default_rng(1)
    thresholds = new_thresholds(3)
    u, v = bucket.u.copy(), bucket.v.copy()
    for step in range(4):
        scales = [1000.0 if step == 3 else 1.0, 1.0, 1.0]
        gradients = [(rng.standard_normal(n) * s).astype(np.float32) for n, s in zip(lengths, scales, strict=True)]
        counts.clear()
        got, theirs = select(bucket, gradients, None, [dict(k=k) for k in ks])
        wanted = cpu.accumulate_and_select(theirs, u, v, thresholds)
        assert_same_selection(got, wanted)
        same_bits(bucket.thresholds, thresholds)
    # Of the second segment what it found was enough: only the first one was copied as a whole.
    assert 4 * 50000 < counts["bytes to host"] < 4 * 75000


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "scale": 128.0}],
    ids=str,
)
def test_dense_updates_equal_the_reference(dtype, options):
    rng, n = np.random.default_rng(0), 5000
    mean, parameter, u = rng.standard_normal((3, n)).astype(dtype)
    result, mine = device(np.full(n, 3, dtype)), device(u.copy())
    wanted = np.full(n, 3, dtype)
    fake_kernels().dense_update(result, mean, mine, device(parameter), MomentumRule(**options))
    ReferenceKernels().dense_update(wanted, mean, u, parameter, MomentumRule(**options))
    same_bits(host(result), wanted)
    same_bits(host(mine), u)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_are_set_in_their_tensors(dtype):
    rng, offsets = np.random.default_rng(0), np.array([0, 3008, 3024, 5024])
    positions = np.sort(rng.choice(5000, 700, replace=False))
    positions = positions[(positions < 3000) | (positions >= 3024)]  # none in the second tensor
    values = rng.standard_normal(positions.size).astype(dtype)
    before = [rng.standard_normal(n).astype(dtype) for n in (3000, 10, 1990)]
    added, wanted = [device(a.copy()) for a in before], [a.copy() for a in before]
    ReferenceKernels().set_entries(wanted, offsets, positions, values)
    fake_kernels().set_entries(added, offsets, positions, values)
    for a, b in zip(added, wanted, strict=True):
        same_bits(host(a), b)
    fake_kernels().set_entries(added, offsets, positions[:0], values[:0])
    assert not any(host(a).any() for a in added)
    with pytest.raises(WireError, match="padding"):
        fake_kernels().set_entries(added, offsets, np.array([3001]), np.ones(1, dtype))


def test_a_vector_is_packed_with_zeros_between_its_tensors():
    """The vector's memory is used again and again."""
    rng, kernels = np.random.default_rng(0), fake_kernels()
    gradients = [
        as_type(rng.standard_normal(n), kind) for n, kind in ((5, "bfloat16"), (33, "float16"), (64, "float32"))
    ]
    offsets, vector = [16, 32, 80], kernels.device.host_array(160, np.float32)
    parts = [SegmentWork(device(g), None, o, g.size, scale=0.5) for o, g in zip(offsets, gradients, strict=True)]
    assert not kernels.begin_packing(parts, vector)()
    wanted = np.zeros(160, np.float32)
    for o, g in zip(offsets, gradients, strict=True):
        wide = (g.astype(np.uint32) << 16).view(np.float32) if g.dtype == np.uint16 else g.astype(np.float32)
        wanted[o : o + g.size] = wide * np.float32(0.5)
    same_bits(vector, wanted)
    host(parts[2].gradient)[7] = np.nan
    assert kernels.begin_packing(parts, vector)()


@pytest.mark.parametrize("limit", [1e6, 3.0])
def test_results_beyond_their_limit_are_found_before_and_after_they_are_written(limit):
    kernels, vector, u = fake_kernels(), np.linspace(-2, 2, 32).astype(np.float32), np.full(32, 2, np.float32)
    result, mine = device(np.zeros(32, np.float32)), device(u.copy())
    part = SegmentWork(length=32, momentum=0.9, result=result, limit=limit)
    beyond = bool(abs(vector + np.float32(0.9) * u).max() > limit)
    assert kernels.exceeds([part], vector, mine, []) is beyond
    assert not host(result).any(), "asking writes nothing"
    same_bits(host(mine), u)
    kernels.update([part], vector, mine)
    assert kernels.exceeds([], vector, mine, [part]) is beyond
    assert kernels.exceeds([], vector, mine, []) is False


def test_sums_of_squares_equal_the_reference(monkeypatch):
    monkeypatch.setattr(device_module, "SQUARED_AT_ONCE", 4096)
    rng = np.random.default_rng(0)
    sizes = ((1, "float32"), (4096, "float16"), (10001, "float32"), (0, "float32"), (77, "float64"), (500, "bfloat16"))
    gradients = [as_type(rng.standard_normal(n), kind) for n, kind in sizes]
    gradients[2][7] = np.inf
    kernels = fake_kernels()
    np.testing.assert_allclose(
        kernels.sums_of_squares([device(g) for g in gradients]),
        ReferenceKernels().sums_of_squares(gradients),
        rtol=1e-12,
    )
    assert kernels.sums_of_squares([]).size == 0
    assert kernels.memory.sum_of_squares(device(gradients[4])) == pytest.approx(np.dot(gradients[4], gradients[4]))


def test_bad_arrays_are_refused():
    kernels, good = fake_kernels(), device(np.zeros(50, np.float32))
    u, v = device(np.zeros(100, np.float32)), device(np.zeros(100, np.float32))
    for work, match in (
        (SegmentWork(device(np.zeros(100, np.float32)[::2]), None, 0, 50, 1), "strided"),
        (SegmentWork(device(np.zeros(50, np.int32)), None, 0, 50, 1), "int32"),
        (SegmentWork(good, None, 60, 50, 1), "does not fit"),
        (SegmentWork(device(np.zeros(49, np.float32)), None, 0, 50, 1), "shape"),
        (SegmentWork(good, device(np.zeros(50, np.int64)), 0, 50, 1, weight_decay=0.1), "int64"),
    ):
        with pytest.raises(LayoutError, match=match):
            kernels.accumulate([work], u, v)
    with pytest.raises(LayoutError, match="u is float64"):
        kernels.accumulate([], device(np.zeros(100)), v)
    with pytest.raises(LayoutError, match="thresholds"):
        kernels.accumulate_and_select([SegmentWork(good, None, 0, 50, 1)], u, v, new_thresholds(2))
    with pytest.raises(LayoutError, match="lie within"):
        kernels.take_out(u, v, np.array([100]), np.ones(1, np.float32), masking=True)
    with pytest.raises(LayoutError, match="decoded"):
        kernels.take_out(u, v, np.array([1, 2]), np.ones(1, np.float32), masking=True)


@pytest.mark.parametrize("tensors", [1, 6])
def test_a_bucket_takes_one_launch_and_one_wait(tensors):
    """However many tensors it has; and small arrays cross together."""
    lengths = [20000] * tensors
    bucket, rng = bucket_of(lengths), np.random.default_rng(0)

    def step():
        gradients = [rng.standard_normal(n).astype(np.float32) for n in lengths]
        return select(bucket, gradients, None, dict(k=20, momentum=0.9))[0]

    for _ in range(3):
        step()
    counts.clear()
    selection = step()
    assert (counts["wait"], counts["to host"], counts["to device"]) == (1, 1, 1)
    assert (counts["launch"], counts["dgc_sweep"], counts["fill"]) == (2, 1, 1)
    results = [device(np.zeros(n, np.float32)) for n in lengths]
    counts.clear()
    bucket.kernels.set_entries(results, bucket.offsets, selection.positions, selection.values)
    bucket.kernels.take_out(bucket.device_u, bucket.device_v, selection.positions, selection.values, masking=True)
    assert (counts["wait"], counts["launch"]) == (0, 3)
    assert counts["to device"] <= 3  # and once the owners of the results' elements


def test_a_selection_without_memory_leaves_u_and_v_as_they_were(monkeypatch):
    """So that it can be begun once more."""

    def none(*_):
        raise MemoryError("no page-locked memory left")

    bucket, gradient = bucket_of([20000]), np.ones(20000, np.float32)
    with monkeypatch.context() as patched:
        patched.setattr(bucket.kernels.device, "host_array", none)
        with pytest.raises(MemoryError):
            select(bucket, [gradient], None, dict(k=20, momentum=0.9))
    bucket.assert_same_state()
    _, theirs = select(bucket, [gradient], None, dict(k=20, momentum=0.9))
    bucket.reference.accumulate(theirs, bucket.u, bucket.v)
    bucket.assert_same_state()


def test_halves_of_all_kinds():
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for array in (bits.view(np.float16), bits):
        bucket = bucket_of([65536])
        _, theirs = select(bucket, [array], None, dict(k=10))
        bucket.reference.accumulate(theirs, bucket.u, bucket.v)
        bucket.assert_same_state()


def test_the_fake_bites():
    """Each accident that it stands for."""
    kernels, a = fake_kernels(), device(np.ones(3, np.float32))
    xp = kernels.device.xp
    for wrong in (lambda: np.asarray(a), lambda: np.abs(a), lambda: a + np.ones(3), lambda: np.ones(3) + a,
                  lambda: np.concatenate([a, a])):  # fmt: skip
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(AssertionError, match="nobody asked"):
        bool(a)
    with pytest.raises(AssertionError, match="default stream"):
        a.fill(0)
    page_locked = kernels.device.host_array(3, np.float32)
    kernels.device.upload(a, page_locked)
    page_locked[:] = 5
    with pytest.raises(AssertionError, match="overwritten"):
        kernels.wait()
    with kernels.device:
        outside = xp.ElementwiseKernel("raw T like", "raw T out", "out[i + 3] = 1;", "wrong", options=("--fmad=false",))
        with pytest.raises(AssertionError, match="outside an array"):
            outside(a, xp.zeros(3, np.float32), size=1)
