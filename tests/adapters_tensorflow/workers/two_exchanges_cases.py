"""Gradients that would be exchanged twice: by two tapes, two libraries, or a tape and an optimizer."""

import horovod.tensorflow as hvd
import models as m
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


def two_losses(inner, library, compression, steps=6):
    """A persistent tape whose ``gradient()`` is asked for two losses."""
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    for step in range(steps):
        x, y = map(tf.constant, m.batch(step))
        with tf.GradientTape(persistent=True) as tape:
            first, second = m.loss_function(y, model(x)), tf.reduce_mean(model(x) ** 2)
        tape = library.DistributedGradientTape(tape, compression=compression)
        parts = [tape.gradient(loss, variables) for loss in (first, second)]
        sums = [a + b for a, b in zip(*parts, strict=True)]
        inner.apply_gradients(zip(sums, model.trainable_variables, strict=True))
    return m.values(model)


@case
def two_gradients_of_one_tape_equal_dense_or_are_refused():
    dense = two_losses(keras.optimizers.SGD(0.05, momentum=0.9), hvd, hvd.Compression.none)
    compression = dgc.Compression.dgc(momentum=0, **m.SPARSITY_0)
    m.assert_close(two_losses(keras.optimizers.SGD(0.05, momentum=0.9), dgc, compression), dense, 1e-5)
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    compression = dgc.Compression.dgc(optimizer=inner, **m.SPARSITY_0)
    m.assert_raises(lambda: two_losses(inner, dgc, compression), "gradient() was called twice on one tape")


@case
def gradients_of_our_tape_in_our_optimizer_are_refused():
    inner = keras.optimizers.SGD(0.05)
    optimizer = dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**m.SPARSE))
    compression = dgc.Compression.dgc(momentum=0, **m.SPARSE)
    model = m.make_model()

    for graph in (False, True):
        step = m.stepper(model, optimizer, compression, graph=graph)
        m.assert_raises(lambda: step(0), "were exchanged already")  # noqa: B023


@case
def stock_and_wrapper_at_once():
    model = m.make_model()
    compression = dgc.Compression.dgc(m.raw(model.trainable_variables), momentum=0.0)
    m.tape_step(model, compression)
    m.assert_raises(lambda: m.tape_step(model, compression, library=hvd), "exchanged twice")


@case
def tape_and_optimizer_at_once():
    model, optimizer = m.make_model(), keras.optimizers.SGD(0.1, momentum=0.9)
    compression = dgc.Compression.dgc(optimizer=optimizer)
    distributed = dgck.DistributedOptimizer(optimizer, compression=compression)
    m.assert_raises(lambda: m.tape_step(model, compression), "a distributed optimizer and by", "exchanged twice")
    assert distributed.compression is compression
