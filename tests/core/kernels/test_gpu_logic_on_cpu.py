"""The CUDA kernels' own text, compiled for a processor, against the NumPy reference: bit for bit.

Blocks and threads run in shuffled orders, so that what a device may do in any order is tried in several.
"""

import subprocess
import sys
from pathlib import Path

import host_runtime
import numpy as np
import pytest
from device_tools import Bucket, convert, same_bits
from host_runtime import HostRuntime, compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.errors import LayoutError, WireError
from dgc.core.kernels import control as rules
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.device_dense import DenseTensor
from dgc.core.kernels.device_kernels import DeviceKernels
from dgc.core.kernels.device_messages import device_format
from dgc.core.kernels.device_tables import Geometry
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.source import source
from dgc.core.layout import Bucket as LayoutBucket
from dgc.core.layout import Segment
from dgc.core.sparse_codec import SparseCodec

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

INDICES = ("uint16", "int32")
VALUES = ("float16", "float32", "bfloat16")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


def draw(rng, length, pattern):
    """Gradients of one tensor."""
    if pattern == "normal":
        return rng.standard_normal(length) * 0.1
    if pattern == "heavy":
        return rng.standard_t(1.5, length) * 0.01
    if pattern == "ties":
        return rng.integers(-3, 4, length) * 0.125
    if pattern == "constant":
        return np.full(length, -0.5)
    if pattern == "zeros":
        return np.zeros(length)
    if pattern == "few":
        g = np.zeros(length)
        g[rng.integers(0, length, 5)] = rng.standard_normal(5)
        return g
    if pattern == "tiny":
        return rng.standard_normal(length) * 1e-42
    if pattern == "huge":
        return rng.standard_normal(length) * 1e37
    assert pattern == "broken"
    g = rng.standard_normal(length)
    g[rng.integers(0, length, 3)] = [np.inf, -np.inf, np.nan]
    return g


PATTERNS = ("normal", "heavy", "ties", "constant", "zeros", "few", "tiny", "huge", "broken")


def step_both(bucket, gradients, parameters, options):
    mine, theirs = bucket.work(gradients, parameters, options)
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.control)
    wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.control)
    bucket.assert_same_state()
    assert got.nonfinite == wanted.nonfinite
    return got, wanted


def assert_same_selection(got, wanted):
    np.testing.assert_array_equal(got.positions, wanted.positions)
    assert got.positions.dtype == np.int64
    same_bits(got.values, wanted.values)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.sampled_from([1, 3, 31, 1000, 4095, 4096, 4097, 9001]), min_size=1, max_size=4),
    density=st.sampled_from([0.001, 0.01, 0.2, 1.0]),
    pattern=st.sampled_from(PATTERNS),
    kind=st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    dtype=st.sampled_from(["float32", "float64"]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 1e-2]),
)
def test_first_step_equals_the_reference(seed, lengths, density, pattern, kind, dtype, momentum, nesterov, decay):
    rng = np.random.default_rng(seed)
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=seed)))
    gradients = [convert(draw(rng, n, pattern), kind) for n in lengths]
    parameters = [convert(rng.standard_normal(n), kind) for n in lengths] if decay else None
    options = [
        dict(k=max(1, int(n * density)), momentum=momentum, nesterov=nesterov, weight_decay=decay, scale=0.37)
        for n in lengths
    ]
    got, wanted = step_both(bucket, gradients, parameters, options)
    assert_same_selection(got, wanted)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    pattern=st.sampled_from(["normal", "heavy", "ties", "constant", "few"]),
    dtype=st.sampled_from(["float32", "float64"]),
    density=st.sampled_from([0.002, 0.02]),
)
def test_steps_with_thresholds_equal_the_reference(seed, pattern, dtype, density):
    """From the second step on candidates are used: exactly the k largest whenever they suffice, else fewer."""
    rng = np.random.default_rng(seed)
    lengths = [20000, 500, 9000]
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=seed)))
    ks = [max(1, int(n * density)) for n in lengths]
    options = [dict(k=k, momentum=0.9) for k in ks]
    for step in range(5):
        size = 1000 if step == 3 else 1  # a jump: the thresholds are of no use
        gradients = [convert(draw(rng, n, pattern) * size, "float32") for n in lengths]
        got, wanted = step_both(bucket, gradients, None, options)
        bounds = np.searchsorted(got.positions, bucket.offsets)
        for s, k in enumerate(ks):
            mine = got.positions[bounds[s] : bounds[s + 1]]
            low, high = np.searchsorted(wanted.positions, bucket.offsets[s : s + 2])
            theirs = wanted.positions[low:high]
            if len(mine) == len(theirs):
                np.testing.assert_array_equal(mine, theirs)
            else:
                assert 0.8 * k <= len(mine) < k
                assert set(mine) <= set(theirs)
        # Both go on from what was sent.
        bucket.kernels.mask(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        bucket.reference.mask(bucket.u, bucket.v, got.positions, got.values, masking=True)
        bucket.assert_same_state()


def test_control_and_selection_equal_the_cpu_backends():
    """Same thresholds, same candidates, same rows of control, step by step."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu").NumbaKernels(1)
    rng = np.random.default_rng(5)
    lengths = [30000, 3000, 12000]
    ks = [60, 30, 12]
    bucket = Bucket(lengths, "float32", DeviceKernels(HostRuntime(seed=1)))
    u, v, control = bucket.u.copy(), bucket.v.copy(), cpu.new_control(3)
    for step in range(12):
        scale = {6: 100.0, 9: 0.0}.get(step, 1.0)
        gradients = [(draw(rng, n, "heavy") * scale).astype(np.float32) for n in lengths]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.control)
        wanted = cpu.accumulate_and_select(theirs, u, v, control)
        assert_same_selection(got, wanted)
        same_bits(bucket.control, control)
        bucket.kernels.mask(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        cpu.mask(u, v, wanted.positions, wanted.values, masking=True)
        same_bits(bucket.device_v, v)


@pytest.mark.parametrize("extra", [-20, -3, -1, 0, 1, 2, 500, 5000])
def test_candidates_just_enough_and_not(extra):
    """Around k candidates, and far off: the same entries and the same control as on the CPU."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu").NumbaKernels(1)
    n, k = 20000, 64
    magnitudes = np.linspace(0.5, 2.0, n, dtype=np.float32)
    gradient = np.random.default_rng(0).permutation(magnitudes) * np.float32(-1)
    bucket = Bucket([n], "float32", DeviceKernels(HostRuntime(seed=9)))
    wanted_control = cpu.new_control(1)
    for control in (bucket.control, wanted_control):
        # What a pass over the same values leaves behind, and then another threshold.
        u, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        cpu.accumulate_and_select([SegmentWork(gradient, None, 0, n, k)], u, v, control)
        control[0, rules.NEXT] = np.sort(magnitudes)[n - k - extra]
    mine, _ = bucket.work([gradient], None, dict(k=k))
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.control)
    wanted = cpu.accumulate_and_select([SegmentWork(gradient, None, 0, n, k)], bucket.u, bucket.v, wanted_control)
    assert_same_selection(got, wanted)
    same_bits(bucket.control, wanted_control)
    assert len(got.positions) == (k + extra if -0.2 * k <= extra < 0 else k)


def test_candidates_far_above_their_threshold():
    """The k-th largest is beyond the bins of the first histogram: whole segments are searched, and rows stay equal."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu").NumbaKernels(1)
    n, k = 20000, 64
    gradient = np.full(n, 0.5, np.float32)
    gradient[::40] = np.linspace(1.0, 1.1, n // 40)
    gradient[7 : 7 + 100 * k : 100] = np.linspace(64.0, 65.0, k)
    bucket = Bucket([n], "float32", DeviceKernels(HostRuntime(seed=9)))
    controls = [bucket.control, cpu.new_control(1)]
    for control in controls:
        u, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        cpu.accumulate_and_select([SegmentWork(gradient, None, 0, n, k)], u, v, control)
        control[0, rules.NEXT] = 1.0
    mine, theirs = bucket.work([gradient], None, dict(k=k))
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.control)
    assert bucket.kernels.runtime.launches.count("emit") == 2
    wanted = cpu.accumulate_and_select(theirs, bucket.u, bucket.v, controls[1])
    assert_same_selection(got, wanted)
    same_bits(*controls)


@pytest.mark.parametrize("seed", [1, 2])
def test_segments_of_many_tiles(seed):
    """More tiles than a block has threads, so that sums run over several rounds, warps and segments."""
    rng = np.random.default_rng(seed)
    lengths = [300000, 1_200_000, 5000]
    bucket = Bucket(lengths, "float32", DeviceKernels(HostRuntime(seed=seed)))
    gradients = [draw(rng, n, "heavy").astype(np.float32) for n in lengths]
    options = [dict(k=n // 100) for n in lengths]
    for _ in range(2):
        got, wanted = step_both(bucket, gradients, None, options)
        assert_same_selection(got, wanted)


@pytest.mark.parametrize("values", ["float16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_messages_over_steps_equal_the_cpus(values, dtype):
    """A jump and a fall of the gradient: the message is written anew when a threshold was of no use."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu").NumbaKernels(1)
    rng = np.random.default_rng(6)
    lengths = [20000, 3000, 9000]
    ks = [40, 30, 9]
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=11, deferred=True)))
    codec = codec_of(bucket, ks, "uint16", values)
    u, v, control = bucket.u, bucket.v, cpu.new_control(3)
    waits = []
    for step in range(9):
        scale = {4: 1000.0, 6: 0.0}.get(step, 1.0)
        gradients = [(draw(rng, n, "heavy") * scale).astype(dtype) for n in lengths]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        before = bucket.kernels.runtime.waits
        _, payload = compress(bucket, mine, codec)
        waits.append(bucket.kernels.runtime.waits - before)
        chosen = cpu.accumulate_and_select(theirs, u, v, control)
        wanted = np.zeros(codec.max_bytes, np.uint8)
        decoded = codec.encode(chosen.positions, chosen.values, wanted)
        cpu.mask(u, v, chosen.positions, decoded, masking=True)
        np.testing.assert_array_equal(payload, wanted)
        same_bits(bucket.control, control)
        bucket.kernels.wait()
        bucket.assert_same_state()
    assert waits[3] == 1
    assert waits[4] == 2, "the jump makes the thresholds useless"


@pytest.mark.parametrize("state", ["float32", "float64"])
def test_launches_do_not_grow_and_the_host_waits_once(state):
    """With thresholds the host waits once for a message, and the number of launches does not depend on the tensors."""
    counts = []
    for lengths in ([20000], [20000] * 6):
        runtime = HostRuntime()
        bucket = Bucket(lengths, state, DeviceKernels(runtime))
        codec = codec_of(bucket, [20] * len(lengths), "uint16", "float16")
        rng = np.random.default_rng(0)
        for _ in range(4):
            gradients = [rng.standard_normal(n).astype(np.float32) for n in lengths]
            runtime.launches.clear()
            runtime.waits = 0
            mine, _ = bucket.work(gradients, None, dict(k=20, momentum=0.9))
            compress(bucket, mine, codec)
        assert runtime.waits == 1
        counts.append(list(runtime.launches))
    assert counts[0] == counts[1]
    levels = 1 if state == "float32" else 4
    assert counts[0] == ["sweep", "locate", *["refine", "locate"] * levels, "count", "scan", "emit", "send"]


# -- messages ------------------------------------------------------------------------------------------------------


def codec_of(bucket, ks, indices, values):
    places = zip(bucket.offsets[:-1].tolist(), bucket.lengths, strict=True)
    segments = tuple(Segment(i, o, n) for i, (o, n) in enumerate(places))
    n = int(bucket.offsets[-1])
    return SparseCodec(LayoutBucket(0, str(bucket.dtype), segments, (), n, n), sum(ks), indices, values)


def compress(bucket, work, codec, payload=None, **more):
    payload = np.full(codec.max_bytes, 0xFF, np.uint8) if payload is None else payload
    form = device_format(codec.indices, codec.values)
    done = bucket.kernels.compress(work, bucket.device_u, bucket.device_v, bucket.control, form, payload, **more)
    return done, payload


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    indices=st.sampled_from(INDICES),
    values=st.sampled_from((*VALUES, "float64")),
    pattern=st.sampled_from(PATTERNS),
    dtype=st.sampled_from(["float32", "float64"]),
    masking=st.booleans(),
    lengths=st.sampled_from([[70000], [1000, 70000, 17], [3], [65536, 65536]]),
)
def test_message_bytes_equal_the_hosts(seed, indices, values, pattern, dtype, masking, lengths):
    """The device writes what the host's codecs write, masks what was sent, and reads it back the same."""
    rng = np.random.default_rng(seed)
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=seed)))
    ks = [max(1, n // 300) for n in lengths]
    codec = codec_of(bucket, ks, indices, values)
    gradients = [draw(rng, n, pattern).astype(dtype) for n in lengths]
    mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.5) for k in ks])
    done, payload = compress(bucket, mine, codec, masking=masking)
    selection = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.control)
    wanted = np.full(codec.max_bytes, 0xFF, np.uint8)
    decoded = codec.encode(selection.positions, selection.values, wanted)
    assert done.count == len(selection.positions)
    assert done.nonfinite == selection.nonfinite
    np.testing.assert_array_equal(payload, wanted)
    kept = bucket.reference.mask(bucket.u, bucket.v, selection.positions, decoded, masking=masking)
    bucket.assert_same_state()

    form = device_format(codec.indices, codec.values)
    n = int(bucket.offsets[-1])
    form.check(payload, n, done.count, codec.indices)
    got = [np.full(m, 7, dtype) for m in lengths]
    bucket.kernels.receive(got, bucket.offsets, n, form, [(payload, done.count), (payload.copy(), done.count)], 1 / 3)
    expected = [np.zeros(m, dtype) for m in lengths]
    for _ in range(2):
        positions, numbers = codec.decode(wanted, done.count, 0)
        bucket.reference.scatter_add(expected, bucket.offsets, positions, numbers, 1 / 3)
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)

    bucket.kernels.restore(bucket.device_u, bucket.device_v, done.kept)
    bucket.reference.restore(bucket.u, bucket.v, kept)
    bucket.assert_same_state()


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-126, 1e-30, 1.0, 65519.0, 3.4028235e38])
def test_float16_scale_over_the_whole_range(largest):
    bucket = Bucket([3000], "float32", DeviceKernels(HostRuntime()))
    codec = codec_of(bucket, [500], "uint16", "float16")
    rng = np.random.default_rng(0)
    gradient = (rng.uniform(-1, 1, 3000) * np.exp2(rng.uniform(-30, 0, 3000)) * largest).astype(np.float32)
    gradient[17] = largest
    mine, theirs = bucket.work([gradient], None, dict(k=500))
    _, payload = compress(bucket, mine, codec)
    selection = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.control)
    wanted = np.zeros(codec.max_bytes, np.uint8)
    decoded = codec.encode(selection.positions, selection.values, wanted)
    np.testing.assert_array_equal(payload, wanted)
    bucket.reference.mask(bucket.u, bucket.v, selection.positions, decoded, masking=True)
    bucket.assert_same_state()


def test_damaged_messages_are_refused_before_they_are_read():
    bucket = Bucket([70000], "float32", DeviceKernels(HostRuntime()))
    n = int(bucket.offsets[-1])
    positions = np.array([5, 9, 65535, 65536, 69999])
    for indices in INDICES:
        codec = codec_of(bucket, [5], indices, "float16")
        payload = np.zeros(codec.max_bytes, np.uint8)
        codec.encode(positions, np.ones(5, np.float32), payload)
        form = device_format(codec.indices, codec.values)
        form.check(payload, n, 5, codec.indices)
        for at in range(codec.indices.max_bytes(n, 5)):
            damaged = payload.copy()
            damaged[at] ^= 0xFF
            try:
                expected = codec.decode(damaged, 5, 0)
            except WireError:
                with pytest.raises(WireError):
                    form.check(damaged, n, 5, codec.indices)
            else:
                form.check(damaged, n, 5, codec.indices)
                assert len(expected[0]) == 5
        with pytest.raises(WireError):
            form.check(payload, n, 4, codec.indices)
        with pytest.raises(WireError):
            form.check(payload[:8], n, 5, codec.indices)
        damaged = payload.copy()
        damaged[codec.indices.max_bytes(n, 5) + 2] = 9
        with pytest.raises(WireError, match="exponent"):
            form.check(damaged, n, 5, codec.indices)


def test_formats_that_the_host_writes():
    bucket = Bucket([5000], "float32", DeviceKernels(HostRuntime()))
    for indices, values in (("bitmap", "float32"), ("uint16", "sign"), ("uint16", "int8")):
        codec = codec_of(bucket, [5], indices, values)
        assert device_format(codec.indices, codec.values) is None


# -- dense tensors, and work at given places -----------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    dtype=st.sampled_from(["float32", "float64"]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 128.0]),
)
def test_dense_tensors(seed, kind, dtype, momentum, nesterov, decay, scale):
    rng = np.random.default_rng(seed)
    runtime = HostRuntime(seed=seed)
    kernels, reference = DeviceKernels(runtime), ReferenceKernels()
    lengths, places = [5, 4097, 0, 64], [0, 16, 4128, 4128]
    gradients = [convert(rng.standard_normal(n), kind) for n in lengths]
    parameters = [convert(rng.standard_normal(n), kind) for n in lengths]
    vector = np.full(4200, np.nan, dtype)
    items = [DenseTensor(gradient=g, vector=p, scale=1 / scale) for g, p in zip(gradients, places, strict=True)]
    none = np.zeros(4200, dtype), np.zeros(0, dtype), kernels.new_control(0), None, np.zeros(0, np.uint8)
    done = kernels.compress([], *none, items, vector)
    assert (done.count, done.nonfinite, done.kept) == (0, False, None)
    expected = np.zeros(4200, dtype)
    for g, p in zip(gradients, places, strict=True):
        wide = (g.astype(np.uint32) << 16).view(np.float32) if g.dtype == np.uint16 else g
        expected[p : p + g.size] = wide.astype(dtype) * np.dtype(dtype).type(1 / scale)
    same_bits(vector, expected)

    u = rng.standard_normal(4200).astype(dtype)
    wanted_u = u.copy()
    results = [np.full(n, 3, dtype) for n in lengths]
    options = dict(momentum=momentum, nesterov=nesterov, weight_decay=decay, scale=scale)
    items = [
        DenseTensor(result=r, parameter=p if decay else None, u=at, vector=at, limit=1.0, **options)
        for r, p, at in zip(results, parameters, places, strict=True)
    ]
    wanted = [np.empty(n, dtype) for n in lengths]
    for r, p, at, n in zip(wanted, parameters, places, lengths, strict=True):
        reference.dense_update(r, vector[at : at + n], wanted_u[at : at + n], p, **options)
    before = u.copy()
    assert kernels.exceeds(items, vector, u) == any((np.abs(r) > 1.0).any() for r in wanted)
    same_bits(u, before)
    kernels.write(items, vector, u)
    for a, b in zip(results, wanted, strict=True):
        same_bits(a, b)
    same_bits(u, wanted_u)
    single = np.full(64, 3, dtype)
    again = before[4128:4192].copy()
    kernels.dense_update(single, vector[4128:4192], again, parameters[3], **options)
    same_bits(single, wanted[3])


def test_dense_tensors_tell_of_nonfinite_entries():
    kernels = DeviceKernels(HostRuntime())
    gradient = np.zeros(5000, np.float16)
    vector = np.zeros(5008, np.float32)
    none = np.zeros(0, np.float32), np.zeros(0, np.float32), kernels.new_control(0), None, np.zeros(0, np.uint8)
    for bad, expected in ((1.0, False), (np.inf, True), (np.nan, True)):
        gradient[4999] = bad
        item = DenseTensor(gradient=gradient, vector=0)
        assert kernels.compress([], *none, [item], vector).nonfinite is expected


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_squares(dtype):
    kernels = DeviceKernels(HostRuntime(seed=2))
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(n).astype(dtype) for n in (1, 4096, 10001)]
    gradients[1][7] = np.inf
    gradients.append(as_half := rng.standard_normal(100).astype(np.float16))
    as_half[3] = np.nan
    got = kernels.sums_of_squares(gradients)
    np.testing.assert_allclose(got, ReferenceKernels().sums_of_squares(gradients), rtol=1e-13)
    assert kernels.sums_of_squares([]).size == 0


def test_work_at_given_places():
    kernels, reference = DeviceKernels(HostRuntime(seed=3)), ReferenceKernels()
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(5000, 700, replace=False))
    u, v = rng.standard_normal((2, 5000)).astype(np.float32)
    decoded = rng.standard_normal(700).astype(np.float32)
    same_bits(kernels.take(v, positions), v[positions])
    mine, theirs = (u.copy(), v.copy()), (u.copy(), v.copy())
    kept = kernels.mask(*mine, positions, decoded, masking=True)
    reference.mask(*theirs, positions, decoded, masking=True)
    same_bits(mine[0], theirs[0])
    same_bits(mine[1], theirs[1])
    kernels.restore(*mine, kept)
    same_bits(mine[0], u)
    same_bits(mine[1], v)
    offsets = np.array([0, 2000, 2016, 5000])
    results = [np.ones(2000, np.float32), np.ones(16, np.float32), np.ones(2984, np.float32)]
    expected = [r.copy() for r in results]
    kernels.scatter_add(results, offsets, positions, decoded, 0.3)
    reference.scatter_add(expected, offsets, positions, decoded, 0.3)
    for a, b in zip(results, expected, strict=True):
        same_bits(a, b)
    none = np.empty(0, np.int64)
    assert kernels.take(v, none).size == 0
    kernels.restore(*mine, kernels.mask(*mine, none, np.empty(0, np.float32), masking=True))
    for bad in ([-1], [5000]):
        with pytest.raises(LayoutError, match="lie within"):
            kernels.take(v, np.array(bad))


def test_bad_arrays_are_refused():
    kernels = DeviceKernels(HostRuntime())
    u, v = np.zeros(100, np.float32), np.zeros(100, np.float32)
    good = np.zeros(50, np.float32)
    for work, match in (
        (SegmentWork(np.zeros(100, np.float32)[::2], None, 0, 50, 1), "strided"),
        (SegmentWork(np.zeros(50, np.int32), None, 0, 50, 1), "int32"),
        (SegmentWork(good, None, 60, 50, 1), "does not fit"),
        (SegmentWork(np.zeros(49, np.float32), None, 0, 50, 1), "shape"),
        (SegmentWork(good, np.zeros(50, np.int64), 0, 50, 1, weight_decay=0.1), "parameter"),
    ):
        with pytest.raises(LayoutError, match=match):
            kernels.accumulate([work], u, v)
    with pytest.raises(LayoutError, match="control"):
        kernels.accumulate_and_select([SegmentWork(good, None, 0, 50, 1)], u, v, kernels.new_control(2))
    with pytest.raises(LayoutError, match="both must be"):
        kernels.accumulate([SegmentWork(good, None, 0, 50, 1)], u.astype(np.float64), v)
    with pytest.raises(LayoutError, match="limit"):
        Geometry([2**31])


def test_unaligned_arrays():
    """A view that begins anywhere: loads of 16 bytes are not possible, results are the same."""
    rng = np.random.default_rng(0)
    for kind in ("float32", "float16", "float64"):
        bucket = Bucket([9000], "float32", DeviceKernels(HostRuntime()))
        whole = rng.standard_normal(9001).astype(kind)
        mine, theirs = bucket.work([whole[1:]], [whole[:-1]], dict(k=9, momentum=0.9, weight_decay=0.1))
        mine[0].gradient, mine[0].parameter = whole[1:], whole[:-1]
        got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.control)
        wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.control)
        assert_same_selection(got, wanted)
        bucket.assert_same_state()


def test_warm_up_runs_every_kernel_of_a_step():
    for dtype in ("float32", "float64"):
        kernels = DeviceKernels(HostRuntime(seed=1, deferred=True))
        kernels.warm_up(dtype)
        expected = {"sweep", "refine", "emit", "send", "receive", "pack", "update", "restore"}
        assert expected <= set(kernels.runtime.launches)
    assert "host" in kernels.describe()


def test_nothing_to_send():
    kernels = DeviceKernels(HostRuntime())
    u, v = np.zeros(64, np.float32), np.zeros(64, np.float32)
    empty = np.zeros(0, np.float32)
    work = [SegmentWork(np.ones(32, np.float32), None, 0, 32, 0), SegmentWork(empty, None, 32, 0, 3)]
    got = kernels.accumulate_and_select(work, u, v, kernels.new_control(2))
    assert got.positions.size == 0
    np.testing.assert_array_equal(v[:32], 1)
    assert kernels.accumulate_and_select([], u, v, kernels.new_control(0)).positions.size == 0


def test_conversions_of_all_halves():
    """Every float16 and every bfloat16 number widens as NumPy widens it."""
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    finite = np.isfinite(bits.view(np.float16))
    kernels = DeviceKernels(HostRuntime())
    for array, expected in (
        (bits.view(np.float16), np.where(finite, bits.view(np.float16), 0).astype(np.float32)),
        (bits, (bits.astype(np.uint32) << 16).view(np.float32)),
    ):
        u, v = np.zeros(65536, np.float32), np.zeros(65536, np.float32)
        kernels.accumulate([SegmentWork(array, None, 0, 65536, 0)], u, v)
        np.testing.assert_array_equal(v, np.where(np.isfinite(expected), expected, 0))


def test_the_stand_in_finds_diverging_barriers(tmp_path):
    """The processor's stand-in for a device must not let wrong code pass: it ends the process."""
    line = "    if (segment.source != CANDIDATES) return;\n"
    assert line in source()
    divergent = "    if (threadIdx.x & 1) __syncthreads(); else __ballot_sync(ALL_LANES, 1);\n"
    text = tmp_path / "broken.cu"
    text.write_text(source().replace(line, divergent + line))
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1])\n"
        "from host_runtime import HostRuntime\n"
        "from dgc.core.kernels.base import SegmentWork\n"
        "from dgc.core.kernels.device_kernels import DeviceKernels\n"
        "u = np.zeros(64, np.float32)\n"
        "work = [SegmentWork(np.ones(64, np.float32), None, 0, 64, 1)]\n"
        "DeviceKernels(HostRuntime(text=open(sys.argv[2]).read())).accumulate(work, u, u.copy())\n"
    )
    tools = str(Path(host_runtime.__file__).parent)
    done = subprocess.run([sys.executable, script, tools, text], capture_output=True, text=True)
    assert done.returncode != 0
    assert "different barriers" in done.stderr
