"""What is summed densely: many small tensors updated together, and a look for what is not finite."""

import numpy as np
import pytest
from exchange_tools import gradient, parameters

from dgc.core.compressors import make_config
from dgc.core.exchange.dense import DenseVector
from dgc.core.exchange.sizes import Setting
from dgc.core.exchange.step import Hyper, Step, Submission, Submissions
from dgc.core.kernels import base
from dgc.core.kernels.base import is_finite
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import make_layout


def written(monkeypatch, small, *, decay, nesterov):
    """What a vector of many tensors writes, and u, when tensors of up to ``small`` elements are updated together."""
    monkeypatch.setattr(base, "SMALL", small)
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
    step = Step(0, 0.001, hyper, 4.0, 0, Submissions(layout))
    results = [np.full(size, 7, np.float32) for size in sizes]
    for i, size in enumerate(sizes):
        weights = gradient(3, 0, i, size)
        step.submissions.add(
            i, Submission(gradient(0, 0, i, size), results[i], weights if hyper.weight_decay[i] else None)
        )
    start, u = bucket.sparse_size, np.zeros(bucket.size, np.float32)
    vector = DenseVector(Setting(bucket, config, 0.001, 2), start=start, origin=start)
    vector.allocate(ReferenceKernels())
    for segment in bucket.segments:
        u[segment.slice] = gradient(1, 0, segment.parameter, segment.length)
    assert not vector.begin_packing(step)()
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
