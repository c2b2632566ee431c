"""Variables, gradients and short runs that the DGCMomentum worker cases share."""

import adapters_tensorflow.workers.models  # noqa: F401  (initialises Horovod and one thread for each rank)
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from paddle_oracle import PaddleOracle

import dgc.tensorflow as dgc

SHAPES = [(16, 1024), (16384,), (127, 129), (64, 3), (30,)]  # the third has 16383 elements


def make_variables(shapes=None):
    generator = np.random.default_rng(4)
    return [tf.Variable(generator.standard_normal(s).astype("f"), name=f"w{i}") for i, s in enumerate(shapes or SHAPES)]


def gradient(shape, step, i, rank=None):
    generator = np.random.default_rng([step, i, hvd.rank() if rank is None else rank])
    return 0.1 * generator.standard_normal(shape).astype("f")


def make(**options):
    return dgc.DGCMomentum(**{"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0, **options})


def train(optimizer, own, steps, start=0):
    for step in range(start, start + steps):
        gradients = [tf.constant(gradient(v.shape, step, i)) for i, v in enumerate(own)]
        optimizer.apply_gradients(zip(gradients, own, strict=True))


def train_in_graph(optimizer, own, steps, start=0):
    optimizer.build(own)

    @tf.function
    def one(gradients):
        optimizer.apply_gradients(zip(gradients, own, strict=True))

    for step in range(start, start + steps):
        one([tf.constant(gradient(v.shape, step, i)) for i, v in enumerate(own)])


def oracle_of(own, **options):
    options = {"lr": 0.1, "momentum": 0.9, "begin": 0, **options}
    return PaddleOracle([v.numpy() for v in own], hvd.size(), **options)


def oracle_train(oracle, own, steps, start=0):
    for step in range(start, start + steps):
        oracle.step(
            [[gradient(v.shape, step, i, rank).ravel() for i, v in enumerate(own)] for rank in range(hvd.size())]
        )


def arrays(own):
    return [v.numpy().copy() for v in own]


def assert_close(own, oracle, bound=2e-6):
    for i, (v, expected) in enumerate(zip(own, oracle.parameters, strict=True)):
        worst = np.abs(v.numpy().ravel() - expected).max() / np.abs(expected).max()
        assert worst <= bound, f"variable {i} differs by {worst:.2e}"
