"""The device backend as a whole, its kernels compiled for a processor: arrays of every kind, and those it refuses."""

import numpy as np
import pytest
from device_tools import Bucket, assert_same_selection, same_bits
from host_runtime import HostRuntime, compiler

from dgc.core.kernels.base import SegmentWork
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.cuda.source import kernel_names
from dgc.core.kernels.gpu.tables import Geometry
from dgc.core.kernels.reference import ReferenceKernels
from dgc.errors import LayoutError

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


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
    with pytest.raises(LayoutError, match="thresholds"):
        kernels.accumulate_and_select([SegmentWork(good, None, 0, 50, 1)], u, v, kernels.new_thresholds(2))
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
        got = bucket.kernels.accumulate_and_select(mine, bucket.device_u, bucket.device_v, bucket.thresholds)
        wanted = bucket.reference.accumulate_and_select(theirs, bucket.u, bucket.v, bucket.thresholds)
        assert_same_selection(got, wanted)
        bucket.assert_same_state()


def test_warm_up_runs_every_kernel_of_a_step():
    for dtype in ("float32", "float64"):
        kernels = DeviceKernels(HostRuntime(seed=1, deferred=True))
        kernels.warm_up(dtype)
        expected = {"sweep", "refine", "emit", "send", "receive", "pack", "update", "mask"}
        assert expected <= set(kernels.runtime.launches)
    assert "host" in kernels.describe()


def test_nothing_to_send():
    kernels = DeviceKernels(HostRuntime())
    u, v = np.zeros(64, np.float32), np.zeros(64, np.float32)
    empty = np.zeros(0, np.float32)
    work = [SegmentWork(np.ones(32, np.float32), None, 0, 32, 0), SegmentWork(empty, None, 32, 0, 3)]
    got = kernels.accumulate_and_select(work, u, v, kernels.new_thresholds(2))
    assert got.positions.size == 0
    np.testing.assert_array_equal(v[:32], 1)
    assert kernels.accumulate_and_select([], u, v, kernels.new_thresholds(0)).positions.size == 0


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


pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        yield


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
    mine, theirs = (u.copy(), v.copy()), (u.copy(), v.copy())
    kernels.mask(*mine, positions, decoded, masking=True)
    reference.mask(*theirs, positions, decoded, masking=True)
    same_bits(mine[0], theirs[0])
    same_bits(mine[1], theirs[1])
    none = np.empty(0, np.int64)
    kernels.mask(*mine, none, np.empty(0, np.float32), masking=True)
    same_bits(mine[0], theirs[0])
    for bad in ([-1], [5000]):
        with pytest.raises(LayoutError, match="lie within"):
            kernels.mask(*mine, np.array(bad), np.ones(1, np.float32), masking=True)


def test_warming_up_runs_every_kernel():
    """No step waits for a kernel to be loaded: not the first refused one, and not the first of float64 either."""
    runtime = HostRuntime()
    kernels = DeviceKernels(runtime)
    for dtype in ("float32", "float64"):
        kernels.warm_up(dtype)
    # Sums of squares are of one type, whatever the state is.
    wanted = {(name, bits) for name in kernel_names() for bits in (32, 64)} - {("squares", 64)}
    assert runtime.kernels == wanted


def test_scratch_comes_from_the_new_allocator():
    """What was kept from the old pool is let go, so that the framework can have it."""
    runtime = HostRuntime()
    kernels = DeviceKernels(runtime)
    kernels.warm_up()
    before = kernels._workspace.get("vector", np.float32, 1)
    functions = (lambda nbytes, stream: 0), (lambda address: None)
    kernels.allocate_with(*functions)
    assert runtime.allocators == [functions]
    assert kernels._workspace.get("vector", np.float32, 1) is not before
    assert kernels._workspace.get("vector", np.float32, 1).base is not before.base
