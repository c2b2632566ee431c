"""The CUDA kernels' own text, compiled for a processor, against the NumPy reference: bit for bit."""

import numpy as np
import pytest
from device_tools import PATTERNS, Bucket, assert_same_selection, compress, convert, draw, same_bits
from host_runtime import HostRuntime, compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.kernels import threshold as rules
from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.gpu import selection
from dgc.core.kernels.gpu.backend import DeviceKernels

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


def step_both(bucket, gradients, parameters, options):
    mine, theirs = bucket.work(gradients, parameters, options)
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
    wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    bucket.assert_same_state()
    assert got.nonfinite == wanted.nonfinite
    return got, wanted


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


@pytest.fixture(params=["", "SHORT", "TILES"], ids=["short lists", "long lists", "long segments"])
def lists(request, monkeypatch):
    """Whether a segment's entries are chosen by one block (True), or by many in several launches."""
    if request.param:
        monkeypatch.setattr(selection, request.param, 0)
    return not request.param


@pytest.mark.usefixtures("lists")
def test_control_and_selection_equal_the_cpu_backends():
    """Same thresholds, same candidates, same rows of thresholds, step by step."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu.backend").NumbaKernels(1)
    rng = np.random.default_rng(5)
    lengths = [30000, 3000, 12000]
    ks = [60, 30, 12]
    bucket = Bucket(lengths, "float32", DeviceKernels(HostRuntime(seed=1)))
    u, v, thresholds = bucket.u.copy(), bucket.v.copy(), cpu.new_thresholds(3)
    for step in range(12):
        scale = {6: 100.0, 9: 0.0}.get(step, 1.0)
        gradients = [(draw(rng, n, "heavy") * scale).astype(np.float32) for n in lengths]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        wanted = cpu.accumulate_and_select(theirs, u, v, thresholds)
        assert_same_selection(got, wanted)
        same_bits(bucket.thresholds, thresholds)
        bucket.kernels.mask(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        cpu.mask(u, v, wanted.positions, wanted.values, masking=True)
        same_bits(bucket.device_v, v)


@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize("extra", [-20, -3, -1, 0, 1, 2, 500, 5000])
def test_candidates_just_enough_and_not(extra):
    """Around k candidates, and far off: the same entries and the same thresholds as on the CPU."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu.backend").NumbaKernels(1)
    n, k = 20000, 64
    magnitudes = np.linspace(0.5, 2.0, n, dtype=np.float32)
    gradient = np.random.default_rng(0).permutation(magnitudes) * np.float32(-1)
    bucket = Bucket([n], "float32", DeviceKernels(HostRuntime(seed=9)))
    wanted_thresholds = cpu.new_thresholds(1)
    for thresholds in (bucket.thresholds, wanted_thresholds):
        # What a pass over the same values leaves behind, and then another threshold.
        u, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        cpu.accumulate_and_select([SegmentWork(gradient, None, 0, n, k)], u, v, thresholds)
        thresholds[0, rules.NEXT] = np.sort(magnitudes)[n - k - extra]
    mine, _ = bucket.work([gradient], None, dict(k=k))
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
    wanted = cpu.accumulate_and_select([SegmentWork(gradient, None, 0, n, k)], bucket.u, bucket.v, wanted_thresholds)
    assert_same_selection(got, wanted)
    same_bits(bucket.thresholds, wanted_thresholds)
    assert len(got.positions) == (k + extra if -0.2 * k <= extra < 0 else k)


def test_candidates_far_above_their_threshold(lists):
    """The k-th largest is beyond the bins of the first histogram: whole segments are searched, and rows stay equal."""
    cpu = pytest.importorskip("dgc.core.kernels.cpu.backend").NumbaKernels(1)
    n, k = 20000, 64
    gradient = np.full(n, 0.5, np.float32)
    gradient[::40] = np.linspace(1.0, 1.1, n // 40)
    gradient[7 : 7 + 100 * k : 100] = np.linspace(64.0, 65.0, k)
    bucket = Bucket([n], "float32", DeviceKernels(HostRuntime(seed=9)))
    both = [bucket.thresholds, cpu.new_thresholds(1)]
    for thresholds in both:
        u, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        cpu.accumulate_and_select([SegmentWork(gradient, None, 0, n, k)], u, v, thresholds)
        thresholds[0, rules.NEXT] = 1.0
    mine, theirs = bucket.work([gradient], None, dict(k=k))
    got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
    launches = bucket.kernels.runtime.launches
    assert (launches.count("choose"), launches.count("emit")) == ((1, 1) if lists else (0, 2))
    wanted = cpu.accumulate_and_select(theirs, bucket.u, bucket.v, both[1])
    assert_same_selection(got, wanted)
    same_bits(*both)


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


@pytest.mark.parametrize("state", ["float32", "float64"])
def test_launches_do_not_grow_and_the_host_waits_once(state):
    """With thresholds the host waits once for a message, and the number of launches does not depend on the tensors."""
    counts = []
    for lengths in ([20000], [20000] * 6):
        runtime = HostRuntime()
        bucket = Bucket(lengths, state, DeviceKernels(runtime))
        rng = np.random.default_rng(0)
        for _ in range(4):
            gradients = [rng.standard_normal(n).astype(np.float32) for n in lengths]
            runtime.launches.clear()
            runtime.waits = 0
            mine, _ = bucket.work(gradients, None, dict(k=20, momentum=0.9))
            compress(bucket, mine)
        assert runtime.waits == 1
        counts.append(list(runtime.launches))
    assert counts == [["sweep", "choose", "send"]] * 2
