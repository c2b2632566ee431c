"""Crossing from TensorFlow to NumPy and back copies nothing of a tensor's size on a CPU."""

import warnings
from types import SimpleNamespace

import tensorflow as tf

from dgc.tensorflow.tensors import warn_of_copies

SHARES_MEMORY = """
import numpy as np
import tensorflow as tf

from dgc.tensorflow.tensors import APPLY, ResultPool, cross

shapes = [(300, 70), (5000,), (64, 64)]
gradients = [tf.random.stateless_normal(s, [1, i]) for i, s in enumerate(shapes)]
variables = [tf.Variable(tf.ones(s)) for s in shapes]
pool = ResultPool(shapes, [np.float32] * len(shapes))
seen = {}


def address(value):
    return np.asarray(value).ctypes.data


def step(arrays, rate, values):
    results = [pool.take(i) for i in range(len(arrays))]
    for result, array in zip(results, arrays):
        result[...] = 2 * array
    seen.update(given=[address(a) for a in arrays], made=[address(r) for r in results])
    return results, APPLY


@tf.function
def graph(given):
    return cross(step, given, None, variables)[0]


def eager(given):
    return cross(step, given, None, variables)[0]


for run in (graph, eager):
    places = [set() for _ in shapes]
    for _ in range(12):
        results = run(gradients)
        assert all(np.array_equal(r, 2 * g) for r, g in zip(results, gradients))
        assert seen["given"] == [address(g) for g in gradients]
        assert seen["made"] == [address(r) for r in results]
        for own, place in zip(places, seen["made"]):
            own.add(place)
        del results
    # Memory is used again. Not always the same: TensorFlow's executor lets go of a result when it comes to it.
    assert all(len(own) <= 6 for own in places)
kept = [graph(gradients) for _ in range(3)]
assert len({address(results[0]) for results in kept}) == 3
"""


def test_tensors_and_results_share_their_memory(ranks):
    ranks.run(SHARES_MEMORY, 1, launcher="single")


def test_copies_from_a_gpu_are_told_once(recwarn):
    on_gpu = [SimpleNamespace(device=f"/job:localhost/replica:0/task:0/device:GPU:{i}") for i in (1, 1)]
    warnings.simplefilter("always")
    warn_of_copies([tf.Variable(1.0)])
    assert not recwarn.list
    for _ in range(2):
        warn_of_copies([tf.Variable(1.0), *on_gpu])
    (told,) = recwarn.list
    assert "copies them there from GPU:1, and results back" in str(told.message)
