"""Ranks that mean different things, or train different models: an error on all of them."""

import functools
import re

import horovod.tensorflow as hvd
import models as m
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras

LAST = hvd.rank() == hvd.size() - 1
"""Whether this rank gets other options than the others."""

ADAMW_OPTIONS = {
    "weight_decay": (0.004, 0.01),
    "beta_1": (0.9, 0.8),
    "beta_2": (0.999, 0.99),
    "epsilon": (1e-7, 1e-8),
    "clipnorm": (None, 1.0),
}


@case(option=["weight_decay", "beta_1", "beta_2", "epsilon", "clipnorm"], eagerly=[False, True])
def an_option_of_the_optimizer_that_differs_is_named_in_the_first_step(option, eagerly):
    usual, other = ADAMW_OPTIONS[option]
    inner = keras.optimizers.AdamW(0.01, **{option: other if LAST else usual})
    model = m.compiled(inner, compression=dgc.Compression.dgc(**m.SPARSE), run_eagerly=eagerly)
    before = m.values(model)
    shown = f"'{option}' is {'null' if usual is None else usual} on rank 0 and {other} on rank 1"
    m.assert_raises(lambda: m.fit(model, 1), "options differ between ranks", shown, "Give every rank the same options")
    assert all((a == b).all() for a, b in zip(m.values(model), before, strict=True))


@case
def an_option_that_differs_is_named_behind_a_tape_if_the_optimizer_is_known():
    for library in (dgc, hvd):
        model, inner = m.make_model(), keras.optimizers.AdamW(0.01, weight_decay=0.01 if LAST else 0.004)
        compression = dgc.Compression.dgc(m.raw(model.trainable_variables), optimizer=inner, **m.SPARSE)
        shown = "'weight_decay' is 0.004 on rank 0 and 0.01 on rank 1"
        m.assert_raises(functools.partial(m.tape_step, model, compression, library=library), shown)
    model, unknown = m.make_model(), dgc.Compression.dgc(momentum=0.0, **m.SPARSE)
    m.tape_step(model, unknown)


@case
def options_that_are_no_numbers_are_not_compared():
    class Own(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError

    for inner in (
        keras.optimizers.AdamW(m.short_schedule(), name=f"own{hvd.rank()}"),
        keras.optimizers.AdamW(0.01, weight_decay=tf.Variable(0.01)),
        Own(0.01, weight_decay=0.01),
    ):
        model = m.compiled(inner, compression=dgc.Compression.dgc(momentum=0.0, **m.SPARSE), run_eagerly=True)
        m.fit(model, 2)


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
        model = m.compiled(optimizer, compression=dgc.Compression.dgc(error_feedback="classic"))
        m.fit(model, 2)
        model.optimizer.learning_rate = 0.1 / (1 + hvd.rank())
        shown = "'learning_rate' is 0.1 on rank 0 and 0.05 on rank 1"
        m.assert_raises(lambda: m.fit(model, 2), shown, "disagree in step 2 about the learning rate")  # noqa: B023


@case(library=["dgc", "hvd"])
def momentum_that_one_rank_changes(library):
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    compression = dgc.Compression.dgc(m.raw(model.trainable_variables), optimizer=inner, **m.SPARSE)
    step = functools.partial(m.tape_step, model, compression, library={"dgc": dgc, "hvd": hvd}[library])
    step()
    inner.momentum = 0.5 if LAST else 0.9
    text = m.assert_raises(step, "is 0.9 on rank 0 and 0.5 on rank 1", "disagree in step 1 about")
    assert re.search(r"'momentum of \S*kernel' is", text), text


@case
def a_restored_model_on_one_rank_without_a_broadcast():
    model = m.compile_model(dgc.Compression.dgc())
    m.fit(model, 2)
    fresh = m.compile_model(dgc.Compression.dgc())
    model = fresh if hvd.rank() else model
    callbacks = [dgck.callbacks.CompressionCheckpoint("never-written")]
    m.assert_raises(lambda: m.fit(model, 2, callbacks=callbacks), "have made [2, 0] steps", "add Broadcast")


@case(broadcasts=[False, True])
def compression_on_one_rank_alone(broadcasts):
    compression = None if hvd.rank() else dgc.Compression.dgc(momentum=0.0, **m.SPARSE)
    callbacks = [m.ROOT(0)] if broadcasts else []
    model = m.compiled(keras.optimizers.SGD(0.1), compression=compression, run_eagerly=True)
    told = "rank 1 has no compressor of dgc's, and rank 0 has one", "compression="
    m.assert_raises(lambda: m.fit(model, 2, callbacks=callbacks), *told)


@case
def gradients_that_differ_between_ranks_in_the_first_step():
    variables = [tf.Variable(tf.ones([40, 40])), tf.Variable(tf.ones([40, 40]))]

    def loss():
        return tf.reduce_sum(variables[0] ** 2) + (tf.reduce_sum(variables[1] ** 2) if hvd.rank() else 0.0)

    for library in (dgc, hvd):
        compression = dgc.Compression.dgc(variables, momentum=0.0)
        step = functools.partial(m.reduced, loss, variables, compression, library)
        m.assert_raises(step, "kinds of gradients", "on rank 1")
