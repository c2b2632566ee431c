"""The CUDA kernels' own text, compiled for a processor: message bytes, dense tensors and work at given places."""

import ctypes

import numpy as np
import pytest
from device_tools import PATTERNS, Bucket, codec_of, compress, convert, draw, same_bits
from host_runtime import HostRuntime, compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.exchange.encoders.device.topk import check_payload, device_format
from dgc.core.kernels.base import MomentumRule
from dgc.core.kernels.gpu import selection
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.tables import DenseTensor
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import WireError

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

INDICES = ("uint16", "int32")
VALUES = ("float16", "float32", "bfloat16")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


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
    done, payload = compress(bucket, mine, codec)
    selection = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    wanted = np.full(codec.max_bytes, 0xFF, np.uint8)
    decoded = codec.encode(selection.positions, selection.values, wanted)
    assert done.count == len(selection.positions)
    assert done.nonfinite == selection.nonfinite
    np.testing.assert_array_equal(payload, wanted)
    bucket.assert_same_state()
    np.testing.assert_array_equal(done.positions, selection.positions)
    bucket.kernels.subtract(bucket.device_u, bucket.device_v, done.positions, done.values, masking=masking)
    bucket.reference.mask(bucket.u, bucket.v, selection.positions, decoded, masking=masking)
    bucket.assert_same_state()

    form = device_format(codec.indices, codec.values)
    n = int(bucket.offsets[-1])
    check_payload(form, payload, n, done.count, codec.indices)
    got = [np.full(m, 7, dtype) for m in lengths]
    bucket.kernels.receive(got, bucket.offsets, n, form, [(payload, done.count), (payload.copy(), done.count)], 1 / 3)
    expected = [np.zeros(m, dtype) for m in lengths]
    for _ in range(2):
        positions, numbers = codec.decode(wanted, done.count)
        bucket.reference.scatter_add(expected, bucket.offsets, positions, numbers, 1 / 3)
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-126, 1e-30, 1.0, 65519.0, 3.4028235e38])
def test_float16_scale_over_the_whole_range(largest):
    bucket = Bucket([3000], "float32", DeviceKernels(HostRuntime()))
    codec = codec_of(bucket, [500], "uint16", "float16")
    rng = np.random.default_rng(0)
    gradient = (rng.uniform(-1, 1, 3000) * np.exp2(rng.uniform(-30, 0, 3000)) * largest).astype(np.float32)
    gradient[17] = largest
    mine, theirs = bucket.work([gradient], None, dict(k=500))
    done, payload = compress(bucket, mine, codec)
    selection = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    wanted = np.zeros(codec.max_bytes, np.uint8)
    decoded = codec.encode(selection.positions, selection.values, wanted)
    np.testing.assert_array_equal(payload, wanted)
    bucket.kernels.subtract(bucket.device_u, bucket.device_v, done.positions, done.values, masking=True)
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
        check_payload(form, payload, n, 5, codec.indices)
        for at in range(codec.indices.max_bytes(n, 5)):
            damaged = payload.copy()
            damaged[at] ^= 0xFF
            try:
                expected = codec.decode(damaged, 5)
            except WireError:
                with pytest.raises(WireError):
                    check_payload(form, damaged, n, 5, codec.indices)
            else:
                check_payload(form, damaged, n, 5, codec.indices)
                assert len(expected[0]) == 5
        with pytest.raises(WireError):
            check_payload(form, payload, n, 4, codec.indices)
        with pytest.raises(WireError):
            check_payload(form, payload[:8], n, 5, codec.indices)
        damaged = payload.copy()
        damaged[codec.indices.max_bytes(n, 5) + 2] = 9
        with pytest.raises(WireError, match="exponent"):
            check_payload(form, damaged, n, 5, codec.indices)


@pytest.mark.parametrize("gathered", [True, False])
def test_only_messages_are_read(gathered):
    """Messages of one array go up from where they lie; between messages of several arrays is memory of others."""
    sources = []

    class Recording(HostRuntime):
        def upload(self, device, host):
            sources.append(host)
            super().upload(device, host)

    bucket = Bucket([3000], "float32", DeviceKernels(Recording()))
    codec = codec_of(bucket, [30], "uint16", "float32")
    size, stride = codec.max_bytes, 1 << 16
    memory = np.zeros(2 * stride, np.uint8)
    payloads = [memory[:size], memory[stride : stride + size]]
    if not gathered:
        bytes_of = [(ctypes.c_uint8 * size).from_address(p.ctypes.data) for p in payloads]
        payloads = [np.frombuffer(owner, np.uint8) for owner in bytes_of]
    mine, _ = bucket.work([np.arange(3000, dtype=np.float32)], None, dict(k=30))
    done, _ = compress(bucket, mine, codec, payloads[0])
    payloads[1][:] = payloads[0]
    got = [np.full(3000, 7, np.float32)]
    messages = [(payload, done.count) for payload in payloads]
    form = device_format(codec.indices, codec.values)
    sources.clear()
    bucket.kernels.receive(got, bucket.offsets, int(bucket.offsets[-1]), form, messages, 0.5)
    assert np.count_nonzero(got[0]) == done.count == 30
    np.testing.assert_array_equal(got[0][-30:], np.arange(2970, 3000))
    (whole,) = [s for s in sources if s.dtype == np.uint8 and s.size >= 2 * size]
    assert np.shares_memory(whole, memory) == gathered


def test_formats_that_the_host_writes():
    bucket = Bucket([5000], "float32", DeviceKernels(HostRuntime()))
    for indices, values in (("elias_fano", "float32"), ("uint16", "sign"), ("uint16", "int8")):
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
    vector = np.full(4192, np.nan, dtype)
    items = [DenseTensor(gradient=g, vector=p, scale=1 / scale) for g, p in zip(gradients, places, strict=True)]
    none = np.zeros(4192, dtype), np.zeros(0, dtype), kernels.new_thresholds(0), None, np.zeros(0, np.uint8)
    done = kernels.compress([], *none, items, vector)
    assert (done.count, done.nonfinite, done.positions) == (0, False, None)
    expected = np.zeros(4192, dtype)
    for g, p in zip(gradients, places, strict=True):
        wide = (g.astype(np.uint32) << 16).view(np.float32) if g.dtype == np.uint16 else g
        expected[p : p + g.size] = wide.astype(dtype) * np.dtype(dtype).type(1 / scale)
    same_bits(vector, expected)

    u = rng.standard_normal(4192).astype(dtype)
    wanted_u = u.copy()
    results = [np.full(n, 3, dtype) for n in lengths]
    options = dict(momentum=momentum, nesterov=nesterov, weight_decay=decay, scale=scale)
    items = [
        DenseTensor(result=r, parameter=p if decay else None, u=at, vector=at, limit=1.0, **options)
        for r, p, at in zip(results, parameters, places, strict=True)
    ]
    wanted = [np.empty(n, dtype) for n in lengths]
    for r, p, at, n in zip(wanted, parameters, places, lengths, strict=True):
        reference.dense_update(r, vector[at : at + n], wanted_u[at : at + n], p, MomentumRule(**options))
    before = u.copy()
    assert kernels.exceeds(items, vector, u)() == any((np.abs(r) > 1.0).any() for r in wanted)
    same_bits(u, before)
    kernels.write(items, vector, u)
    for a, b in zip(results, wanted, strict=True):
        same_bits(a, b)
    same_bits(u, wanted_u)
    single = np.full(64, 3, dtype)
    again = before[4128:4192].copy()
    kernels.dense_update(single, vector[4128:4192], again, parameters[3], MomentumRule(**options))
    same_bits(single, wanted[3])


def test_dense_tensors_tell_of_nonfinite_entries():
    kernels = DeviceKernels(HostRuntime())
    gradient = np.zeros(5000, np.float16)
    vector = np.zeros(5008, np.float32)
    none = np.zeros(0, np.float32), np.zeros(0, np.float32), kernels.new_thresholds(0), None, np.zeros(0, np.uint8)
    for bad, expected in ((1.0, False), (np.inf, True), (np.nan, True)):
        gradient[4999] = bad
        item = DenseTensor(gradient=gradient, vector=0)
        assert kernels.compress([], *none, [item], vector).nonfinite is expected


@pytest.mark.parametrize("short", [selection.SHORT, 0])
@pytest.mark.parametrize("values", ["float16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_messages_over_steps_equal_the_cpus(values, dtype, short, monkeypatch):
    """A jump and a fall of the gradient: the message is written anew when a threshold was of no use."""
    monkeypatch.setattr(selection, "SHORT", short)
    cpu = pytest.importorskip("dgc.core.kernels.cpu.backend").NumbaKernels(1)
    rng = np.random.default_rng(6)
    lengths = [20000, 3000, 9000]
    ks = [40, 30, 9]
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=11, deferred=True)))
    codec = codec_of(bucket, ks, "uint16", values)
    u, v, thresholds = bucket.u, bucket.v, cpu.new_thresholds(3)
    waits = []
    for step in range(9):
        scale = {4: 1000.0, 6: 0.0}.get(step, 1.0)
        gradients = [(draw(rng, n, "heavy") * scale).astype(dtype) for n in lengths]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        before = bucket.kernels.runtime.waits
        done, payload = compress(bucket, mine, codec)
        waits.append(bucket.kernels.runtime.waits - before)
        bucket.kernels.subtract(bucket.device_u, bucket.device_v, done.positions, done.values, masking=True)
        chosen = cpu.accumulate_and_select(theirs, u, v, thresholds)
        wanted = np.zeros(codec.max_bytes, np.uint8)
        decoded = codec.encode(chosen.positions, chosen.values, wanted)
        cpu.mask(u, v, chosen.positions, decoded, masking=True)
        np.testing.assert_array_equal(payload, wanted)
        same_bits(bucket.thresholds, thresholds)
        bucket.kernels.wait()
        bucket.assert_same_state()
    assert waits[3] == 1
    assert waits[4] == 2, "the jump makes the thresholds useless"


def test_buckets_that_are_begun_together_do_not_meet():
    """Three buckets are enqueued before anybody waits. In a segment of two of them a threshold fails: the others'
    entries stay, though the scratch that they were chosen from is another bucket's by then."""
    runtime = HostRuntime(seed=5, deferred=True)
    together = DeviceKernels(runtime)
    lengths, ks = [20000, 3000, 9000], [40, 30, 9]
    pairs = []
    for _ in range(3):
        ours, alone = (Bucket(lengths, "float32", k) for k in (together, DeviceKernels(HostRuntime())))
        codec = codec_of(ours, ks, "uint16", "float16")
        pairs.append((ours, alone, codec, together.new_scratch(), np.zeros((2, codec.max_bytes), np.uint8)))
    rng, waits = np.random.default_rng(2), []
    for step in range(6):
        begun, before, given = [], runtime.waits, []
        for i, (ours, alone, codec, scratch, payloads) in enumerate(pairs):
            gradients = [draw(rng, n, "heavy").astype(np.float32) for n in lengths]
            if step == 4:
                gradients[i] *= np.float32(1000)
            mine, theirs = (b.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])[0] for b in (ours, alone))
            given.append(mine)  # the kernels know their addresses
            form = device_format(codec.indices, codec.values)
            begun.append(
                together.begin(mine, ours.device_u, ours.device_v, ours.thresholds, form, payloads[0], scratch=scratch)
            )
            payloads[1] = compress(alone, theirs, codec)[1]
        done = [each.finish() for each in begun]
        waits.append(runtime.waits - before)
        together.wait()
        for (ours, alone, _, _, payloads), each in zip(pairs, done, strict=True):
            np.testing.assert_array_equal(payloads[0], payloads[1])
            same_bits(ours.thresholds, alone.thresholds)
            same_bits(ours.device_u, alone.device_u)
            same_bits(ours.device_v, alone.device_v)
            assert each.count > 0
    assert waits[3] == waits[5] == 1
    assert waits[4] == 3, "one for all, and one for each bucket whose threshold was of no use; small tensors have none"
