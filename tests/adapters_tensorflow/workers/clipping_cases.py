"""Keras clips what it is handed: with a momentum in the compressor that would be a velocity, not a gradient."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.errors import ConfigError

keras = m.keras
CLIPPING = {"clipnorm": 0.05, "clipvalue": 0.002, "global_clipnorm": 0.1}
"""Low enough to act in every step."""


def step(optimizer, variable, value=1.0):
    optimizer.apply_gradients([(tf.fill(variable.shape, value), variable)])


@case
def a_clip_of_dgc_momentums_velocity_is_refused():
    for name, value in CLIPPING.items():
        for graph in (False, True):
            variable = tf.Variable(tf.zeros([64, 4]))
            optimizer = dgck.DGCMomentum(0.1, 0.9, 3)

            def one(optimizer=optimizer, variable=variable):
                step(optimizer, variable)

            run = tf.function(one) if graph else one
            run()
            before = np.asarray(variable).copy()
            setattr(optimizer, name, value)
            m.assert_raises(run, f"{name}={value}", "local_grad_clip_norm")
            np.testing.assert_array_equal(np.asarray(variable), before)
            setattr(optimizer, name, None)
            optimizer.reset()
            run()
            assert (np.asarray(variable) < before).all()
            optimizer.close()


@case
def a_clip_that_one_rank_alone_sets_is_an_error_on_all():
    variable = tf.Variable(tf.zeros([64, 4]))
    optimizer = dgck.DGCMomentum(0.1, 0.9, 3)
    if hvd.rank() == 1:
        optimizer.clipnorm = 0.05
    for _ in range(2):  # the first step of all, in which nothing was agreed upon, is one like the others
        m.assert_raises(lambda: step(optimizer, variable), "clipnorm=0.05")
        assert not np.asarray(variable).any()
    optimizer.close()


@case
def without_momentum_dgc_momentum_clips_the_mean_as_dense_does():
    for name, value in CLIPPING.items():
        found, wanted = (tf.Variable(tf.zeros([64, 4])) for _ in range(2))
        optimizer, dense = dgck.DGCMomentum(0.1, 0.0, 99), keras.optimizers.SGD(0.1, **{name: value})
        setattr(optimizer, name, value)
        for i in range(5):
            step(optimizer, found, 1.0 + i + hvd.rank())
            step(dense, wanted, 1.0 + i + (hvd.size() - 1) / 2)
        m.assert_close([np.asarray(found)], [np.asarray(wanted)], 1e-6)
        optimizer.close()


@case
def a_clip_that_comes_later_is_refused_beside_a_compressors_own_momentum():
    for make in (keras.optimizers.SGD, keras.optimizers.Adam):
        for name, value in CLIPPING.items():
            variable, inner = tf.Variable(tf.zeros([64, 4])), make(0.1)
            optimizer = dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(momentum=0.9))
            step(optimizer, variable)
            setattr(optimizer, name, value)
            m.assert_raises(lambda: step(optimizer, variable), f"{name}={value}", "velocity")  # noqa: B023


@case
def thresholds_of_any_type_count():
    for value in (1, np.float32(0.5), np.int64(1), tf.constant(0.5)):
        inner = keras.optimizers.SGD(0.1)
        inner.clipnorm = value
        m.assert_raises(
            lambda: dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(momentum=0.9)),  # noqa: B023
            "would act on the velocity",
            kinds=(ConfigError,),
        )
    inner = keras.optimizers.SGD(0.1)
    inner.clipnorm = np.float32(0)
    dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(momentum=0.9))


if __name__ == "__main__":
    run_cases()
