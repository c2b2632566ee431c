"""What is summed densely of a bucket on a device: the same bits as on a CPU, in and out."""

import numpy as np
import pytest
from device_exchange_tools import device_kernels
from exchange_tools import gradient, parameters
from host_runtime import compiler

from dgc.core.compressors import make_config
from dgc.core.exchange.encoders.dense_vector import DenseVector
from dgc.core.exchange.encoders.device.vector import DeviceVector
from dgc.core.exchange.records import Hyper, StepContext, Submission, Submissions
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.layout import make_layout
from dgc.core.plan import Mode, make_plan

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

SHAPES = {"weight": (30, 41), "bias": (7,), "scale": (5,), "head": (40, 40)}


class Run:
    """A vector, its plan and step, on a device or on a CPU; ``wait`` until what was asked for is done."""

    def __init__(self, on_device, density, *, loss_scale=1.0, limit=None, spoil=None, **options):
        config = make_config({"min_numel": 64, "momentum": 0.9, **options})
        layout = make_layout(parameters(SHAPES), config)
        (self.bucket,) = layout.buckets
        hyper = Hyper.uniform(len(SHAPES), config)
        self.step = StepContext(0, density, hyper, loss_scale, 0, Submissions(layout))
        self.results = [np.full(p.numel, 7, np.float32) for p in layout.parameters]
        for i, each in enumerate(layout.parameters):
            given = gradient(0, 0, i, each.numel) * np.float32(loss_scale)
            if i == spoil:
                given[-1] = np.inf
            decayed = gradient(2, 0, i, each.numel) if config.weight_decay else None
            self.step.submissions.add(i, Submission(given, self.results[i], decayed, limit=limit))
        self.plan = make_plan(self.bucket, density=density, ranks=2, indices="uint16", values="float16")
        kernels = device_kernels() if on_device else NumbaKernels(1)
        self.vector = (DeviceVector if on_device else DenseVector)(self.bucket, kernels)
        self.vector.start(self.plan)
        self.u = np.zeros(self.bucket.size, np.float32)
        for segment in self.bucket.segments:
            self.u[segment.slice] = gradient(1, 0, segment.parameter, segment.length)
        self.wait = kernels.wait if on_device else lambda: None


def both(*args, **options):
    return [Run(on_device, *args, **options) for on_device in (True, False)]


def same(mine, theirs):
    for got, wanted in zip([*mine.results, mine.u], [*theirs.results, theirs.u], strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.01}], ids=str)
@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
@pytest.mark.parametrize("density", [None, 0.001, 1.0])
@pytest.mark.parametrize("refused", [False, True])
def test_equals_the_cpu(density, loss_scale, refused, options):
    runs = both(density, loss_scale=loss_scale, **options)
    for run in runs:
        if run.plan.mode is Mode.SUM:
            run.vector.values[: run.bucket.sparse_size] = 3
        assert run.vector.pack(run.step, run.plan) is False
        run.wait()
    mine, theirs = runs
    places = [s.slice for s in mine.bucket.segments if s.offset >= mine.plan.vector_start]
    first = mine.plan.vector_start
    for place in places:
        inside = slice(place.start - first, place.stop - first)
        np.testing.assert_array_equal(mine.vector.values[inside], theirs.vector.values[inside])
    for run in runs:
        assert run.vector.average(0.5, run.plan)
        if run.plan.mode is Mode.SUM:
            run.vector.write_sum(run.step)
        run.vector.write(run.step, run.u, refused=refused)
        run.wait()
    same(*runs)
    assert any((result != 7).any() for result in mine.results)


@pytest.mark.parametrize("spoil", range(len(SHAPES)))
@pytest.mark.parametrize("density", [None, 0.001])
def test_a_value_that_is_not_finite_is_met_where_it_is_sent_dense(density, spoil):
    mine, theirs = both(density, spoil=spoil)
    assert mine.vector.pack(mine.step, mine.plan) == theirs.vector.pack(theirs.step, theirs.plan)


@pytest.mark.parametrize(("limit", "answer"), [(1e3, False), (1e-3, True)])
def test_a_result_too_large_for_its_type_is_met_before_anything_is_written(limit, answer):
    mine, _ = both(None, limit=limit)
    mine.vector.pack(mine.step, mine.plan)
    mine.wait()
    before = mine.u.copy()
    asked = mine.vector.overflows(mine.step, mine.u)
    assert asked() is answer
    np.testing.assert_array_equal(mine.u, before)
    for result in mine.results:
        np.testing.assert_array_equal(result, 7)


def test_what_the_encoder_packed_is_not_packed_again():
    mine, _ = both(0.001)
    mine.vector.values.fill(5)
    mine.vector.is_packed = True
    assert mine.vector.pack(mine.step, mine.plan) is False
    mine.wait()
    np.testing.assert_array_equal(mine.vector.values, 5)
    mine.vector.start(mine.plan)
    assert not mine.vector.is_packed
