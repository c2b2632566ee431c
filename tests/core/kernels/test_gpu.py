"""The device kernels on a real GPU: the reference's bits, the CPU backend's thresholds, and no waiting."""

import threading
import time

import numpy as np
import pytest
from kernel_tools import Bucket, as_type, assert_same_selection, entries, same_bits

from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.kernels.threshold import new_thresholds

gpu = pytest.importorskip(
    "dgc.core.kernels.gpu", reason="CuPy is not installed: pip install cupy-cuda12x", exc_type=ImportError
)
LENGTHS = [300000, 4096, 1000, 70001, 1]


@pytest.fixture(scope="module")
def kernels():
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
        kernels.memory.copy_in(device, array)
    return device


def bucket_of(kernels, lengths):
    return Bucket(lengths, kernels, lambda a: on_device(kernels, a), kernels.memory.to_host)


# Without "tiny": CuPy compiles with -ftz=true, which takes denormal numbers for 0.
@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["normal", "heavy", "ties", "zeros", "huge", "bad"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_reference(kernels, pattern, kind, momentum):
    rng = np.random.default_rng(0)
    bucket = bucket_of(kernels, LENGTHS)
    options = [
        dict(k=max(1, n // 500), momentum=momentum, nesterov=i % 2 == 1, weight_decay=0.01 * (i % 3), scale=0.37)
        for i, n in enumerate(LENGTHS)
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        gradients = [as_type(entries(rng, pattern, n), kind) for n in LENGTHS]
        parameters = [as_type(rng.standard_normal(n), kind) for n in LENGTHS]
        mine, theirs = bucket.work(gradients, parameters, options)
        got = kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    bucket.assert_same_state()
    assert got.nonfinite == wanted.nonfinite
    assert_same_selection(got, wanted)


@pytest.mark.gpu
def test_steps_equal_the_cpu_backend(kernels):
    cpu, rng = NumbaKernels(2), np.random.default_rng(1)
    bucket = bucket_of(kernels, LENGTHS)
    ks = [max(1, n // 1000) for n in LENGTHS]
    u, v, thresholds = bucket.u.copy(), bucket.v.copy(), new_thresholds(len(LENGTHS))
    for step in range(20):
        scale = {8: 1000.0, 14: 0.0}.get(step, 1.0)
        gradients = [(entries(rng, "heavy", n) * scale).astype(np.float32) for n in LENGTHS]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        got = kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        wanted = cpu.accumulate_and_select(theirs, u, v, thresholds)
        assert_same_selection(got, wanted)
        same_bits(bucket.thresholds, thresholds)
        kernels.take_out(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        cpu.take_out(u, v, wanted.positions, wanted.values, masking=True)
    same_bits(kernels.memory.to_host(bucket.device_v), v)


@pytest.mark.gpu
def test_sums_of_squares_equal_the_reference(kernels):
    rng = np.random.default_rng(3)
    gradients = [as_type(rng.standard_normal(n), "bfloat16") for n in LENGTHS]
    found = kernels.sums_of_squares([on_device(kernels, g) for g in gradients])
    np.testing.assert_allclose(found, ReferenceKernels().sums_of_squares(gradients), rtol=1e-12)


@pytest.mark.gpu
def test_nothing_waits_but_the_selection(kernels):
    """With the stream held up for a while, every call returns at once, but for the one wait of a selection."""
    import cupy

    spin = cupy.RawKernel(
        r"""extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n) {} }""",
        "spin",
    )
    rng = np.random.default_rng(4)
    bucket = bucket_of(kernels, [200000, 5000])
    results = [kernels.memory.zeros(n, np.float32) for n in bucket.lengths]

    def hold():
        with kernels.device:
            spin((1,), (1,), (np.int64(4_000_000_000),))  # 1.3 s or more

    def step(before):
        gradients = [rng.standard_normal(m).astype(np.float32) for m in bucket.lengths]
        mine, _ = bucket.work(gradients, None, [dict(k=200), dict(k=50)])
        before()
        times = [time.perf_counter()]
        finish = kernels.begin_selection(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        times.append(time.perf_counter())
        done = finish()
        times.append(time.perf_counter())
        before()
        kernels.set_entries(results, bucket.offsets, done.positions, done.values)
        kernels.take_out(bucket.device_u, bucket.device_v, done.positions, done.values, masking=True)
        times.append(time.perf_counter())
        kernels.wait()
        return np.diff(times)

    for _ in range(5):
        step(lambda: None)
    enqueueing, waiting, applying = step(hold)
    assert enqueueing < 1, "everything was enqueued while the stream was held up"
    assert waiting > 0.5, "the stream was not held up: the test shows nothing"
    assert applying < 1, "results are enqueued, not waited for"


@pytest.mark.gpu
def test_views_of_foreign_memory(kernels):
    import cupy

    with cupy.cuda.Device(0):
        owner = cupy.arange(100, dtype=np.float32)
        cupy.cuda.Stream.null.synchronize()
    view = kernels.device.view(owner.data.ptr + 40, 50, np.dtype(np.float32), owner)
    np.testing.assert_array_equal(kernels.memory.to_host(view), np.arange(10, 60))
    u, v = kernels.memory.zeros(50, np.float32), kernels.memory.zeros(50, np.float32)
    kernels.accumulate([SegmentWork(view, None, 0, 50, 0)], u, v)
    np.testing.assert_array_equal(kernels.memory.to_host(v), np.arange(10, 60))


class Driver:
    """CUDA's current device, one for each thread; a thread begins with device 0."""

    def __init__(self):
        self._thread = threading.local()
        self.chosen = []

    def current(self):
        return getattr(self._thread, "device", 0)

    def choose(self, device):
        self._thread.device = device
        self.chosen.append(device)


def test_a_thread_of_ours_takes_the_device_once_and_never_goes_back():
    """Going back to device 0 would open a context on it, in every process of a host."""
    driver = Driver()
    device = gpu.CurrentDevice(3, driver.current, driver.choose)

    def own():
        device.adopt_thread()
        for _ in range(5):
            with device, device:
                assert driver.current() == 3
        assert driver.current() == 3

    thread = threading.Thread(target=own)
    thread.start()
    thread.join()
    assert driver.chosen == [3]


@pytest.mark.parametrize("theirs", [0, 1, 3])
def test_a_callers_thread_keeps_its_device(theirs):
    driver = Driver()
    device = gpu.CurrentDevice(3, driver.current, driver.choose)
    driver.choose(theirs)
    driver.chosen.clear()
    with device:
        with device:
            assert driver.current() == 3
        assert driver.current() == 3
    assert driver.current() == theirs
    assert driver.chosen == ([] if theirs == 3 else [3, theirs])
    with pytest.raises(KeyError), device:
        raise KeyError
    assert driver.current() == theirs
