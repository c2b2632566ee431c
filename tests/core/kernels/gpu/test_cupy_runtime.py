"""The kernels on a real GPU: the reference's bits, the CPU backend's thresholds, and no waiting."""

import time

import numpy as np
import pytest
from code_tools import CASES, check_codes
from device_tools import Bucket, as_bfloat16, convert, draw, same_bits

from dgc.core.kernels.base import MomentumRule, SegmentWork
from dgc.core.kernels.gpu.tables import DenseTensor
from dgc.core.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.gpu

LENGTHS = [300000, 4096, 1000, 70001, 1]


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from dgc.core.kernels.gpu import cupy_runtime as gpu

    try:
        count = gpu.device_count()
    except RuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    if count == 0:
        pytest.skip("no CUDA device")
    return gpu.CupyKernels(0)


def on_device(kernels, array):
    device = kernels.memory.zeros(array.size, array.dtype)
    if array.size:
        kernels.runtime.upload(device, array)
        kernels.wait()
    return device


def bucket_of(kernels, lengths, dtype):
    return Bucket(lengths, dtype, kernels, lambda a: on_device(kernels, a), kernels.memory.to_host)


@pytest.mark.parametrize("pattern", ["normal", "heavy", "ties", "zeros", "tiny", "broken"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_reference(kernels, pattern, kind, dtype, momentum):
    rng = np.random.default_rng(0)
    bucket = bucket_of(kernels, LENGTHS, dtype)
    options = [
        dict(k=max(1, n // 500), momentum=momentum, nesterov=i % 2 == 1, weight_decay=0.01 * (i % 3), scale=0.37)
        for i, n in enumerate(LENGTHS)
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        gradients = [convert(draw(rng, n, pattern), kind) for n in LENGTHS]
        parameters = [convert(rng.standard_normal(n), kind) for n in LENGTHS]
        mine, theirs = bucket.work(gradients, parameters, options)
        got = kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    bucket.assert_same_state()
    assert got.nonfinite == wanted.nonfinite
    np.testing.assert_array_equal(got.positions, wanted.positions)
    same_bits(got.values, wanted.values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_equal_the_cpu_backend(kernels, dtype):
    cpu = pytest.importorskip("dgc.core.kernels.cpu.backend").NumbaKernels(2)
    rng = np.random.default_rng(1)
    bucket = bucket_of(kernels, LENGTHS, dtype)
    ks = [max(1, n // 1000) for n in LENGTHS]
    u, v, thresholds = bucket.u.copy(), bucket.v.copy(), cpu.new_thresholds(len(LENGTHS))
    for step in range(20):
        scale = {8: 1000.0, 14: 0.0}.get(step, 1.0)
        gradients = [(draw(rng, n, "heavy") * scale).astype(dtype) for n in LENGTHS]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        got = kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        wanted = cpu.accumulate_and_select(theirs, u, v, thresholds)
        np.testing.assert_array_equal(got.positions, wanted.positions)
        same_bits(got.values, wanted.values)
        same_bits(bucket.thresholds, thresholds)
        kernels.mask(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        cpu.mask(u, v, wanted.positions, wanted.values, masking=True)
    same_bits(kernels.memory.to_host(bucket.device_v), v)


@pytest.mark.parametrize("pattern", ["normal", "heavy", "ties", "zeros", "tiny"])
def test_entries_add_up_as_the_references(kernels, pattern):
    rng = np.random.default_rng(2)
    bucket = bucket_of(kernels, LENGTHS, "float32")
    mine, _ = bucket.work(
        [draw(rng, n, pattern).astype(np.float32) for n in LENGTHS],
        None,
        [dict(k=max(1, n // 300), momentum=0.5) for n in LENGTHS],
    )
    done = kernels.compress(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
    results = [kernels.memory.zeros(m, np.float32) for m in LENGTHS]
    kernels.receive(results, bucket.offsets, [(done.positions, done.values)] * 3, 1 / 3)
    expected = [np.zeros(m, np.float32) for m in LENGTHS]
    for _ in range(3):
        bucket.reference.scatter_add(expected, bucket.offsets, done.positions, done.values, 1 / 3)
    for a, b in zip(results, expected, strict=True):
        same_bits(kernels.memory.to_host(a), b)


def test_dense_tensors(kernels):
    rng = np.random.default_rng(3)
    reference = ReferenceKernels()
    lengths, places = [5, 4097, 64], [0, 16, 4128]
    gradients = [as_bfloat16(rng.standard_normal(n)) for n in lengths]
    u = rng.standard_normal(4192).astype(np.float32)
    vector = kernels.runtime.host_array(4192, np.float32)
    device_gradients = [on_device(kernels, g) for g in gradients]
    tensors = [DenseTensor(gradient=g, vector=p) for g, p in zip(device_gradients, places, strict=True)]
    assert not kernels.pack(tensors, vector)
    for g, p in zip(gradients, places, strict=True):
        same_bits(vector[p : p + g.size], (g.astype(np.uint32) << 16).view(np.float32))
    device_u = on_device(kernels, u)
    results = [kernels.memory.zeros(n, np.float32) for n in lengths]
    options = dict(momentum=0.9, nesterov=True, weight_decay=0.1, scale=128.0)
    kernels.write(
        [
            DenseTensor(result=r, parameter=g, u=p, vector=p, **options)
            for r, g, p in zip(results, device_gradients, places, strict=True)
        ],
        vector,
        device_u,
    )
    for r, g, p in zip(results, gradients, places, strict=True):
        wanted = np.empty(g.size, np.float32)
        reference.dense_update(wanted, vector[p : p + g.size], u[p : p + g.size], g, MomentumRule(**options))
        same_bits(kernels.memory.to_host(r), wanted)
    same_bits(kernels.memory.to_host(device_u), u)
    squares = kernels.sums_of_squares(device_gradients)
    np.testing.assert_allclose(squares, reference.sums_of_squares(gradients), rtol=1e-12)


SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def test_nothing_waits_but_the_message(kernels, monkeypatch):
    """With the stream held up for a while, every call returns at once, but for the one wait of a message."""
    import cupy

    spin = cupy.RawKernel(SPIN, "spin")
    runtime = kernels.runtime
    rng = np.random.default_rng(4)
    bucket = bucket_of(kernels, [200000, 5000], "float32")
    results = [kernels.memory.zeros(n, np.float32) for n in bucket.lengths]
    vector = runtime.host_array(64, np.float32)
    dense = on_device(kernels, np.ones(64, np.float32))

    def hold():
        with cupy.cuda.Device(0), runtime.stream:
            spin((1,), (1,), (np.int64(4_000_000_000),))  # 1.3 s or more

    def step(before):
        mine, _ = bucket.work(
            [rng.standard_normal(m).astype(np.float32) for m in bucket.lengths], None, [dict(k=200), dict(k=50)]
        )
        before()
        start = time.perf_counter()
        done = kernels.compress(
            mine, bucket.device_u, bucket.device_v, bucket.thresholds, [DenseTensor(gradient=dense, vector=0)], vector,
        )  # fmt: skip
        middle = time.perf_counter()
        before()
        kernels.receive(results, bucket.offsets, [(done.positions, done.values)], 1.0)
        kernels.write([DenseTensor(result=dense, vector=0, momentum=0.9)], vector, bucket.device_u)
        kernels.mask(bucket.device_u, bucket.device_v, done.positions, done.values, masking=True)
        end = time.perf_counter()
        kernels.wait()
        return start, middle, end

    for _ in range(5):
        step(lambda: None)
    waits = []
    synchronize = runtime.synchronize

    def counted(event):
        waits.append(time.perf_counter())
        synchronize(event)

    monkeypatch.setattr(runtime, "synchronize", counted)
    spin((1,), (1,), (np.int64(1),))
    uploads = len(waits)
    start, middle, end = step(hold)
    inside = [t for t in waits[uploads:] if start <= t <= middle]
    assert len(inside) == 1, "one wait for the message"
    assert inside[0] - start < 1, "everything was enqueued while the stream was held up"
    assert middle - start > 1, "the stream was not held up: the test shows nothing"
    assert end - middle < 1, "results are enqueued, not waited for"


@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-42, 1e38])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_equal_the_hosts(kernels, case, dtype, factor):
    """Zeros, what is denormal, and what overflows included."""

    def values(alone):
        return (alone.random() * factor).astype(alone.dtype)

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        check_codes(case, kernels, dtype, values, lambda a: on_device(kernels, a), kernels.memory.to_host)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_group_of_one_device_adds_up_to_what_is_there(kernels, dtype):
    """All that one device can show of NCCL: it is found, connects, takes our memory, and works on our stream."""
    pytest.importorskip("torch", reason="PyTorch brings NCCL along")
    values = np.arange(5000, dtype=dtype)
    array = on_device(kernels, values)
    joined = kernels.runtime.join(kernels.runtime.new_group(), 0, 1)
    joined.add_up(array)
    kernels.scale(array, 0.5)
    np.testing.assert_array_equal(kernels.memory.to_host(array), values * values.dtype.type(0.5))


def test_views_of_foreign_memory(kernels):
    import cupy

    with cupy.cuda.Device(0):
        owner = cupy.arange(100, dtype=np.float32)
        cupy.cuda.Stream.null.synchronize()
    view = kernels.runtime.view(owner.data.ptr + 40, 50, np.dtype(np.float32), owner)
    assert kernels.runtime.address(view) == owner.data.ptr + 40
    np.testing.assert_array_equal(kernels.memory.to_host(view), np.arange(10, 60))
    u, v = kernels.memory.zeros(50, np.float32), kernels.memory.zeros(50, np.float32)
    kernels.accumulate([SegmentWork(view, None, 0, 50, 0)], u, v)
    np.testing.assert_array_equal(kernels.memory.to_host(v), np.arange(10, 60))
