"""Keras clips what it is handed: with a momentum in the compressor that would be a velocity, not a gradient."""

import functools
import itertools
import warnings

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.errors import ConfigError

keras = m.keras
CLIPPING = {"clipnorm": 0.05, "clipvalue": 0.002, "global_clipnorm": 0.1}
"""Low enough to act in every step."""


def step(optimizer, variable, value=1.0):
    optimizer.apply_gradients([(tf.fill(variable.shape, value), variable)])


@case(name=CLIPPING, graph=(False, True))
def a_clip_of_dgc_momentums_velocity_is_refused(name, graph):
    variable, optimizer = tf.Variable(tf.zeros([64, 4])), dgck.DGCMomentum(0.1, 0.9, 3)

    def one():
        step(optimizer, variable)

    run = tf.function(one) if graph else one
    run()
    before = np.asarray(variable).copy()
    setattr(optimizer, name, CLIPPING[name])
    m.assert_raises(run, f"{name}={CLIPPING[name]}", "local_grad_clip_norm")
    np.testing.assert_array_equal(np.asarray(variable), before)
    setattr(optimizer, name, None)
    optimizer.compression.reset()
    run()
    assert (np.asarray(variable) < before).all()


@case
def a_clip_that_one_rank_alone_sets_is_an_error_on_all():
    variable = tf.Variable(tf.zeros([64, 4]))
    optimizer = dgck.DGCMomentum(0.1, 0.9, 3)
    if hvd.rank() == 1:
        optimizer.clipnorm = 0.05
    for _ in range(2):  # the first step of all, in which nothing was agreed upon, is one like the others
        m.assert_raises(lambda: step(optimizer, variable), "clipnorm=0.05")
        assert not np.asarray(variable).any()


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


@case
def clipping_in_the_optimizer_equals_dense():
    plain = m.values(m.fitted(keras.optimizers.SGD(m.short_schedule(), momentum=0.9)))
    for (name, value), nesterov, graph in zip(
        CLIPPING.items(), (False, True, False), (True, False, False), strict=True
    ):
        options = {"momentum": 0.9, "nesterov": nesterov, name: value}
        dense = m.values(m.fitted(keras.optimizers.SGD(m.short_schedule(), **options)))
        assert any(abs(a - b).max() > 1e-2 for a, b in zip(dense, plain, strict=True)), "nothing was clipped"
        compression = dgc.Compression.dgc(**m.SPARSITY_0)
        model = m.fitted(keras.optimizers.SGD(m.short_schedule(), **options), compression, graph=graph)
        m.assert_close(m.values(model), dense, 1e-5)
        assert compression.stats.steps == 6


@case
def clipping_keeps_replicas_alike_and_is_said_once_on_rank_0():
    for clip, value in CLIPPING.items():
        with m.warned("momentum stays in the optimizer") as said:
            compression = dgc.Compression.dgc(**m.SPARSE)
            model = m.fitted(keras.optimizers.SGD(0.05, momentum=0.9, **{clip: value}), compression)
        m.assert_replicas(m.values(model))
        assert compression.stats.total.density < 0.012
        assert len(said) == (hvd.rank() == 0), said
        assert all(clip in text for text in said)


@case
def clipping_without_momentum_in_the_optimizer_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = m.eager(keras.optimizers.SGD(0.05, clipnorm=0.05), dgc.Compression.dgc(**m.SPARSE))
        m.eager(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.05), dgc.Compression.dgc(momentum=0))
    m.fit(model, 3)


@case
def a_clip_of_a_velocity_that_comes_later_is_refused():
    """A compressor's own momentum, and one that it has adopted: a momentum, or a first moment."""
    own = [(make, {"momentum": 0.9}) for make in (keras.optimizers.SGD, keras.optimizers.Adam)]
    adopted = [(functools.partial(keras.optimizers.SGD, momentum=0.9), {"error_feedback": "classic"})]
    if not m.LEGACY:
        adopted.append((keras.optimizers.Adam, {"error_feedback": "classic"}))
    for (make, options), (name, value) in itertools.product([*own, *adopted], CLIPPING.items()):
        variable = tf.Variable(tf.zeros([64, 4]))
        compression = dgc.Compression.dgc(**m.SPARSE, **options)
        optimizer = dgck.DistributedOptimizer(make(0.1), compression=compression)
        step(optimizer, variable)
        setattr(optimizer, name, value)
        m.assert_raises(lambda: step(optimizer, variable), f"{name}={value}", "would act on the velocity")  # noqa: B023
