"""The device kernels on a fake device: the CPU backend's thresholds, packing, limits, and failures."""

import numpy as np
import pytest
from fake_device import counts, device, fake_kernels, host, needs_compiler
from kernel_tools import Bucket, as_type, assert_same_selection, entries, same_bits

from dgc.core.kernels import _try_out as try_out
from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.threshold import new_thresholds

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


def test_the_step_that_tries_kernels_out():
    try_out(fake_kernels())


def bucket_of(lengths):
    return Bucket(lengths, fake_kernels(), lambda a: device(np.array(a)), host)


def select(bucket, gradients, parameters, options):
    mine, theirs = bucket.work(gradients, parameters, options)
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
    return got, theirs


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
