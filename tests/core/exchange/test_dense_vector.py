"""What is summed densely: its way into the vector, the mean, momentum on the way out, and what is left by a refusal."""

import numpy as np
import pytest
from exchange_tools import gradient, parameters

from dgc.core.compressors import make_config
from dgc.core.exchange import encoders
from dgc.core.exchange.encoders import DenseVector, is_finite
from dgc.core.exchange.records import Hyper, StepContext, Submission, Submissions
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout
from dgc.core.plan import Mode, make_plan

SHAPES = {"weight": (30, 41), "bias": (7,), "scale": (5,), "head": (40, 40)}
DENSE = ("bias", "scale")
NAMES = list(SHAPES)


def prepared(density, *, loss_scale=1.0, limit=None, spoil=None, **options):
    """A vector, its plan, the step, and the gradients by name."""
    config = make_config({"min_numel": 64, "momentum": 0.9, **options})
    layout = make_layout(parameters(SHAPES), config)
    (bucket,) = layout.buckets
    step = StepContext(0, density, Hyper.uniform(len(SHAPES), config), loss_scale, 0, Submissions(layout))
    grads = {}
    for i, each in enumerate(layout.parameters):
        grads[each.name] = gradient(0, 0, i, each.numel) * np.float32(loss_scale)
        if each.name == spoil:
            grads[each.name][-1] = np.inf
        step.submissions.add(i, Submission(grads[each.name], np.full(each.numel, 7, np.float32), limit=limit))
    plan = make_plan(bucket, density=density, ranks=2, indices="uint16", values="float16")
    vector = DenseVector(bucket, ReferenceKernels())
    vector.start(plan)
    vector.values.fill(np.nan)  # what a step before may have left
    return vector, plan, step, grads


def where(vector, plan):
    """Name -> its place in the vector."""
    segments = [s for s in vector._bucket.segments if s.offset >= plan.vector_start]
    return {
        NAMES[s.parameter]: slice(s.offset - plan.vector_start, s.offset - plan.vector_start + s.length)
        for s in segments
    }


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
@pytest.mark.parametrize(("density", "names"), [(None, NAMES), (0.001, DENSE)])
def test_gradients_are_unscaled_and_everything_between_them_is_zero(density, names, loss_scale):
    vector, plan, step, grads = prepared(density, loss_scale=loss_scale)
    assert vector.pack(step, plan) is False
    places = where(vector, plan)
    assert set(places) == set(names)
    for name, place in places.items():
        np.testing.assert_array_equal(vector.values[place], grads[name] / np.float32(loss_scale))
        vector.values[place] = 0
    np.testing.assert_array_equal(vector.values, 0)


def test_a_dense_sum_of_entries_keeps_what_the_encoder_wrote():
    vector, plan, step, grads = prepared(1.0)
    assert plan.mode is Mode.SUM
    size = vector._bucket.sparse_size
    vector.values[:size] = 3
    vector.pack(step, plan)
    np.testing.assert_array_equal(vector.values[:size], 3)
    for name in DENSE:
        np.testing.assert_array_equal(vector.values[where(vector, plan)[name]], grads[name])


@pytest.mark.parametrize("spoil", NAMES)
@pytest.mark.parametrize("density", [None, 0.001])
def test_a_value_that_is_not_finite_is_met_where_it_is_sent_dense(density, spoil):
    vector, plan, step, _ = prepared(density, spoil=spoil)
    assert vector.pack(step, plan) == (density is None or spoil in DENSE)


@pytest.mark.parametrize("same", [True, False])
def test_the_vector_waits_before_its_memory_is_replaced_and_only_then(same):
    class Waiting(DenseVector):
        waits = 0

        def _wait(self):
            self.waits += 1

    vector, plan, *_ = prepared(0.001)
    waiting = Waiting(vector._bucket, ReferenceKernels())
    waiting.start(plan)
    codecs = {"indices": "uint16", "values": "float32"}
    waiting.start(plan if same else make_plan(vector._bucket, density=None, ranks=2, **codecs))
    assert waiting.waits == 2 - same


def test_a_sum_that_overflows_is_met():
    vector, plan, _, _ = prepared(None)
    vector.values.fill(1e38)
    assert vector.average(0.5, plan)
    vector.values[3] = np.inf
    assert not vector.average(0.5, plan)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_results_are_momentum_sgd_and_a_refused_step_leaves_the_momentum(refused, nesterov):
    vector, plan, step, grads = prepared(None, loss_scale=4.0, nesterov=nesterov)
    vector.pack(step, plan)
    vector.average(0.5, plan)
    bucket = vector._bucket
    u = np.full(bucket.size, 0.25, np.float32)
    vector.write(step, u, refused=refused)
    for segment in bucket.segments:
        mean = grads[NAMES[segment.parameter]] / 8
        velocity = np.float32(0.9 * 0.25) + mean
        wanted = mean if refused else mean + np.float32(0.9) * velocity if nesterov else velocity
        np.testing.assert_allclose(step.submissions[segment.parameter].result, 4 * wanted, rtol=1e-6)
        np.testing.assert_allclose(u[segment.slice], 0.25 if refused else velocity, rtol=1e-6)


def test_a_result_too_large_for_its_type_is_met_before_anything_is_written():
    for limit, answer in ((1e3, False), (1e-3, True)):
        vector, plan, step, _ = prepared(None, limit=limit)
        vector.pack(step, plan)
        u = np.full(vector._bucket.size, 0.25, np.float32)
        assert vector.overflows(step, u)() is answer
        np.testing.assert_array_equal(u, np.float32(0.25))
        for i in range(len(SHAPES)):
            np.testing.assert_array_equal(step.submissions[i].result, 7)


def written(monkeypatch, small, *, decay, nesterov):
    """What a vector of many tensors writes, and u, when tensors of up to ``small`` elements are updated together."""
    monkeypatch.setattr(encoders, "SMALL", small)
    sizes = [1, 15, 16, 17, 40, 33, 0, 64, 65, 5]
    shapes = {f"p{i}": (size,) for i, size in enumerate(sizes)}
    config = make_config({"min_numel": 64})
    layout = make_layout(parameters(shapes), config)
    (bucket,) = layout.buckets
    hyper = Hyper(
        [0.9] * 4 + [0.5] * 3 + [0.0] * 3,
        [nesterov] * 5 + [False] * 5,
        [decay] * 2 + [0.0] * 6 + [decay] * 2,
        [1.0] * 10,
    )
    step = StepContext(0, 0.001, hyper, 4.0, 0, Submissions(layout))
    results = [np.full(size, 7, np.float32) for size in sizes]
    for i, size in enumerate(sizes):
        weights = gradient(3, 0, i, size)
        step.submissions.add(
            i, Submission(gradient(0, 0, i, size), results[i], weights if hyper.weight_decay[i] else None)
        )
    plan = make_plan(bucket, density=0.001, ranks=2, indices="uint16", values="float16")
    vector, u = DenseVector(bucket, ReferenceKernels()), np.zeros(bucket.size, np.float32)
    vector.start(plan)
    for segment in bucket.segments:
        u[segment.slice] = gradient(1, 0, segment.parameter, segment.length)
    vector.pack(step, plan)
    vector.write(step, u, refused=False)
    return results, u


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_tensors_updated_together_get_the_same_bits_as_alone(monkeypatch, decay, nesterov):
    alone, u = written(monkeypatch, 0, decay=decay, nesterov=nesterov)
    for small in (40, 64, 4096):
        together, u_too = written(monkeypatch, small, decay=decay, nesterov=nesterov)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(u, u_too)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_that_is_not_finite_is_seen_and_large_ones_are_not_taken_for_one(dtype):
    largest = np.finfo(dtype).max
    assert is_finite(np.empty(0, dtype))
    assert is_finite(np.array([1, -2, 0], dtype))
    assert is_finite(np.array([largest, -largest, largest], dtype)), "their squares and their sum overflow"
    for wrong in (np.nan, np.inf, -np.inf):
        for place in (0, 500, 999):
            values = np.ones(1000, dtype)
            values[place] = wrong
            assert not is_finite(values)
    assert not is_finite(np.array([np.inf, -np.inf], dtype))
