"""Ranks that mean different things, or train different models: an error on all of them."""

import functools

import horovod.tensorflow as hvd
import models as m
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


@case
def momentum_that_differs_between_ranks():
    inner = keras.optimizers.SGD(0.1, momentum=0.5 if hvd.rank() else 0.9)
    compression = dgc.Compression.dgc(optimizer=inner)
    m.assert_raises(lambda: m.tape_step(m.make_model(), compression), "momentum=0.9", "momentum=0.5")


@case
def models_that_were_never_broadcast():
    """The mean of gradients of unlike models fits none of them: it ends with the second step at the latest."""

    def train(rank, rate=0.1, steps=3):
        model, optimizer = m.make_model(1 + rank), keras.optimizers.SGD(rate, momentum=0.9)
        compression = dgc.Compression.dgc(optimizer=optimizer)
        for _ in range(steps):
            gradients = m.tape_step(model, compression)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train(0)
    text = m.assert_raises(lambda: train(hvd.rank()), "do not train the same model", "broadcast")
    assert "in the same place on rank 1" in text
    m.assert_raises(lambda: train(0, 0.1 + hvd.rank()), "disagree in step 0 about the learning rate")
    model = m.compile_model(dgc.Compression.dgc(), model=m.make_model(1 + hvd.rank()))
    m.assert_raises(lambda: m.fit(model, 3), "BroadcastGlobalVariablesCallback")


@case
def learning_rates_that_drift_apart():
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)):
        model = m.compiled(optimizer, compression=dgc.Compression.dgc())
        m.fit(model, 2)
        model.optimizer.learning_rate = 0.1 / (1 + hvd.rank())
        m.assert_raises(lambda: m.fit(model, 2), "disagree in step 2 about the learning rate")  # noqa: B023


@case
def a_state_that_only_one_rank_can_load():
    model = m.make_model()
    compression = dgc.Compression.dgc(momentum=0.0)
    m.tape_step(model, compression)
    state = compression.state_dict()
    damaged = {**state, "size": 4} if hvd.rank() else state
    m.assert_raises(lambda: compression.load_state_dict(damaged), "resize=True")


@case
def a_restored_model_on_one_rank_and_the_callbacks_in_the_wrong_order():
    model = m.compile_model(dgc.Compression.dgc())
    m.fit(model, 2)
    fresh = m.compile_model(dgc.Compression.dgc())
    model = fresh if hvd.rank() else model
    callbacks = [
        dgck.callbacks.CompressionCheckpoint("never-written"),
        dgck.callbacks.BroadcastGlobalVariablesCallback(0),
    ]
    m.assert_raises(lambda: m.fit(model, 2, callbacks=callbacks), "have made [2, 0] steps", "after Broadcast")


@case
def gradients_that_differ_between_ranks_in_the_first_step():
    variables = [tf.Variable(tf.ones([40, 40])), tf.Variable(tf.ones([40, 40]))]

    def loss():
        return tf.reduce_sum(variables[0] ** 2) + (tf.reduce_sum(variables[1] ** 2) if hvd.rank() else 0.0)

    for library in (dgc, hvd):
        compression = dgc.Compression.dgc(variables, momentum=0.0)
        step = functools.partial(m.reduced, loss, variables, compression, library)
        m.assert_raises(step, "kinds of gradients", "on rank 1")
