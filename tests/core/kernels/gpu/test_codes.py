"""Codes of few bits by the CUDA kernels' own text, compiled for a processor: equal to the host's loops bit for bit."""

import ctypes

import numpy as np
import pytest
from code_tools import CASES, CodedBucket, check_codes
from host_runtime import HostRuntime, compiler

from dgc.core.kernels.gpu.backend import DeviceKernels

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

VALUES = {
    "normal": lambda alone: alone.random(),
    "zeros": lambda alone: alone.random() * 0,
    "constant": lambda alone: alone.flat({t.name: -0.5 for t in alone.tensors}),
    "one sign": lambda alone: np.abs(alone.random()),
    "tiny": lambda alone: (alone.random() * 1e-42).astype(alone.dtype),
    "all magnitudes": lambda alone: decades(alone),
    "huge": lambda alone: (alone.random() * 1e38).astype(alone.dtype),
}


def decades(alone):
    """Beyond what float32 can hold, in float64: such scales are cut to its largest, and small ones round up."""
    spans = {"float32": (-44, 38), "float64": (-70, 45)}[alone.dtype]
    x = alone.random()
    return (np.sign(x) * 10.0 ** np.random.default_rng(2).uniform(*spans, x.size)).astype(alone.dtype)


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_hosts_loops(case, dtype, values):
    kernels = DeviceKernels(HostRuntime(seed=3))
    check_codes(case, kernels, dtype, VALUES[values], np.array, np.array)


def test_sums_that_are_not_finite_are_met():
    bucket = CodedBucket(CASES[0], DeviceKernels(HostRuntime()))
    x = bucket.alone.flat({t.name: 3e38 for t in bucket.alone.tensors})
    payload = np.zeros(bucket.encoder._size, np.uint8)
    bucket.write(x.copy(), x, payload)
    results = [np.zeros(p.length, np.float32) for p in bucket.parts]
    assert bucket.kernels.add_codes(results, bucket.parts, [payload], 1.0) == (False, False)
    assert bucket.kernels.add_codes(results, bucket.parts, [payload, payload], 1.0) == (False, True)


def test_a_code_that_nobody_writes_is_met():
    bucket = CodedBucket(CASES[3], DeviceKernels(HostRuntime()))
    x = bucket.alone.random()
    payload = np.zeros(bucket.encoder._size, np.uint8)
    bucket.write(x.copy(), x, payload)
    payload[bucket.parts[0].codes] = 0xFF
    results = [np.zeros(p.length, np.float32) for p in bucket.parts]
    assert bucket.kernels.add_codes(results, bucket.parts, [payload], 1.0)[0]


@pytest.mark.parametrize("gathered", [True, False])
def test_only_messages_are_read(gathered):
    """Messages of one array go up from where they lie; between messages of several arrays is memory of others."""
    sources = []

    class Recording(HostRuntime):
        def upload(self, device, host):
            sources.append(host)
            super().upload(device, host)

    bucket = CodedBucket(CASES[0], DeviceKernels(Recording()))
    size = bucket.encoder._size
    stride = -(-size // 8) * 8 + 4096
    memory = np.zeros(2 * stride, np.uint8)
    payloads = [memory[:size], memory[stride : stride + size]]
    if not gathered:
        bytes_of = [(ctypes.c_uint8 * size).from_address(p.ctypes.data) for p in payloads]
        payloads = [np.frombuffer(owner, np.uint8) for owner in bytes_of]
    x = bucket.alone.random()
    bucket.write(x.copy(), x, payloads[0])
    payloads[1][:] = payloads[0]
    once, twice = ([np.zeros(p.length, np.float32) for p in bucket.parts] for _ in range(2))
    bucket.kernels.add_codes(once, bucket.parts, payloads[:1], 1.0)
    sources.clear()
    bucket.kernels.add_codes(twice, bucket.parts, payloads, 1.0)
    for a, b in zip(once, twice, strict=True):
        assert a.any()
        np.testing.assert_array_equal(b, 2 * a)
    (whole,) = [s for s in sources if s.dtype == np.uint8 and s.size >= 2 * size]
    assert np.shares_memory(whole, memory) == gathered


def test_nothing_is_launched_for_no_tensor():
    runtime = HostRuntime()
    kernels = DeviceKernels(runtime)
    runtime.operations.clear()
    assert kernels.add_codes([], [], [np.zeros(8, np.uint8)], 1.0) == (False, False)
    assert "decode" not in runtime.operations
