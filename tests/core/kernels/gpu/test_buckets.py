"""The CUDA kernels' own text, compiled for a processor: selected entries, dense tensors and work at given places."""

import numpy as np
import pytest
from device_tools import PATTERNS, Bucket, assert_same_selection, compress, convert, draw, same_bits
from host_runtime import HostRuntime, compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.core.kernels.base import MomentumRule
from dgc.core.kernels.gpu import selection
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.tables import DenseTensor
from dgc.core.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    pattern=st.sampled_from(PATTERNS),
    dtype=st.sampled_from(["float32", "float64"]),
    masking=st.booleans(),
    lengths=st.sampled_from([[70000], [1000, 70000, 17], [3], [65536, 65536]]),
    ranks=st.sampled_from([1, 2, 200]),
)
def test_entries_equal_the_references(seed, pattern, dtype, masking, lengths, ranks):
    """The device selects what the reference selects, masks what was sent, and adds up what came in rank order."""
    rng = np.random.default_rng(seed)
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=seed)))
    ks = [max(1, n // 300) for n in lengths]
    gradients = [draw(rng, n, pattern).astype(dtype) for n in lengths]
    mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.5) for k in ks])
    got = compress(bucket, mine)
    wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
    assert_same_selection(got, wanted)
    assert got.nonfinite == wanted.nonfinite
    bucket.assert_same_state()
    bucket.kernels.mask(bucket.device_u, bucket.device_v, got.positions, got.values, masking=masking)
    bucket.reference.mask(bucket.u, bucket.v, wanted.positions, wanted.values, masking=masking)
    bucket.assert_same_state()

    entries = [(got.positions[r % 3 :], got.values[r % 3 :] * dtype_of(dtype, r)) for r in range(ranks)]
    results = [np.full(m, 7, dtype) for m in lengths]
    bucket.kernels.receive(results, bucket.offsets, entries, 1 / 3)
    expected = [np.zeros(m, dtype) for m in lengths]
    for positions, values in entries:
        bucket.reference.scatter_add(expected, bucket.offsets, positions, values, 1 / 3)
    for a, b in zip(results, expected, strict=True):
        same_bits(a, b)


def dtype_of(dtype, rank):
    """A factor of each rank's own, so that the order of the ranks shows."""
    return np.dtype(dtype).type(1 + rank / 7)


def test_nothing_that_came_is_zero():
    bucket = Bucket([5000, 7], "float32", DeviceKernels(HostRuntime()))
    results = [np.full(m, 7, np.float32) for m in bucket.lengths]
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    bucket.kernels.receive(results, bucket.offsets, [none, none], 1.0)
    assert not any(r.any() for r in results)


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
    none = np.zeros(4192, dtype), np.zeros(0, dtype), kernels.new_thresholds(0)
    done = kernels.compress([], *none, items, vector)
    assert (done.positions.size, done.values.size, done.nonfinite) == (0, 0, False)
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
    none = np.zeros(0, np.float32), np.zeros(0, np.float32), kernels.new_thresholds(0)
    for bad, expected in ((1.0, False), (np.inf, True), (np.nan, True)):
        gradient[4999] = bad
        item = DenseTensor(gradient=gradient, vector=0)
        assert kernels.compress([], *none, [item], vector).nonfinite is expected


@pytest.mark.parametrize("short", [selection.SHORT, 0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_over_steps_equal_the_cpus(dtype, short, monkeypatch):
    """A jump and a fall of the gradient: the entries are written anew when a threshold was of no use."""
    monkeypatch.setattr(selection, "SHORT", short)
    cpu = pytest.importorskip("dgc.core.kernels.cpu.backend").NumbaKernels(1)
    rng = np.random.default_rng(6)
    lengths = [20000, 3000, 9000]
    ks = [40, 30, 9]
    bucket = Bucket(lengths, dtype, DeviceKernels(HostRuntime(seed=11, deferred=True)))
    u, v, thresholds = bucket.u, bucket.v, cpu.new_thresholds(3)
    waits = []
    for step in range(9):
        scale = {4: 1000.0, 6: 0.0}.get(step, 1.0)
        gradients = [(draw(rng, n, "heavy") * scale).astype(dtype) for n in lengths]
        mine, theirs = bucket.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])
        before = bucket.kernels.runtime.waits
        got = compress(bucket, mine)
        waits.append(bucket.kernels.runtime.waits - before)
        bucket.kernels.mask(bucket.device_u, bucket.device_v, got.positions, got.values, masking=True)
        wanted = cpu.accumulate_and_select(theirs, u, v, thresholds)
        cpu.mask(u, v, wanted.positions, wanted.values, masking=True)
        assert_same_selection(got, wanted)
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
        pairs.append((ours, alone, together.new_scratch()))
    rng, waits = np.random.default_rng(2), []
    for step in range(6):
        begun, before, given, wanted = [], runtime.waits, [], []
        for i, (ours, alone, scratch) in enumerate(pairs):
            gradients = [draw(rng, n, "heavy").astype(np.float32) for n in lengths]
            if step == 4:
                gradients[i] *= np.float32(1000)
            mine, theirs = (b.work(gradients, None, [dict(k=k, momentum=0.9) for k in ks])[0] for b in (ours, alone))
            given.append(mine)  # the kernels know their addresses
            begun.append(together.begin(mine, ours.device_u, ours.device_v, ours.thresholds, scratch=scratch))
            wanted.append(compress(alone, theirs))
        done = [each.finish() for each in begun]
        waits.append(runtime.waits - before)
        together.wait()
        for (ours, alone, _), each, expected in zip(pairs, done, wanted, strict=True):
            assert_same_selection(each, expected)
            same_bits(ours.thresholds, alone.thresholds)
            same_bits(ours.device_u, alone.device_u)
            same_bits(ours.device_v, alone.device_v)
            assert each.positions.size > 0
    assert waits[3] == waits[5] == 1
    assert waits[4] == 3, "one for all, and one for each bucket whose threshold was of no use; small tensors have none"
