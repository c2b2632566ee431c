"""dgc.tensorflow.join with uneven numbers of batches, behind a tape and in Keras' fit()."""

from unittest.mock import patch

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case
from worker_tools import uneven_batches as batches

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

FRESH = "Horovod's thread has crashed in hvd.join() on ranks that had served 170 other cases"
MOST = hvd.size() - 2
"""The rank with the most batches, so that the last one is not the highest."""


def tape_run(gap, options=None):
    """Dense, by Horovod's tape, without options; returns the model, its optimizer, the compressor and one step."""
    model, inner = m.make_model(), m.keras.optimizers.SGD(0.05, momentum=0.9)
    compression, library = m.compressor("dense" if options is None else "wrapper", model, inner, **(options or {}))
    one_step = m.stepper(model, inner, compression, library)

    def train(steps, start=0):
        for step in range(start, start + steps):
            one_step(step)

    train(batches(gap))
    return model, inner, compression, train


def variables_of(optimizer):
    listed = optimizer.variables
    return list(listed() if callable(listed) and not isinstance(listed, list) else listed)


@case
def a_tape_equals_horovods_join_at_sparsity_0():
    for gap in (1, 5):
        dense, inner, _, train_dense = tape_run(gap)
        hvd.join()
        hvd.broadcast_variables(m.raw([*dense.trainable_variables, *variables_of(inner)]), root_rank=MOST)
        model, _, compression, train = tape_run(gap, m.SPARSITY_0)
        assert dgc.join(compression) == MOST
        m.assert_close(m.values(model), m.values(dense), 1e-5)
        assert not m.replicas_differ(m.values(model))
        train_dense(3, start=90)
        train(3, start=90)
        m.assert_close(m.values(model), m.values(dense), 1e-5)


@case
def replicas_are_identical_at_sparsity_099():
    for gap in (1, 5):
        model, inner, compression, train = tape_run(gap, m.SPARSE)
        for _ in range(2):
            dgc.join(compression)
            assert not m.replicas_differ([*m.values(model), *map(np.asarray, variables_of(inner))])
            assert compression.residual_norm > 0
            train(batches(gap), start=40)
        dgc.join(compression)
        assert compression.describe()["step"] == 3 * batches(gap, MOST)


@case
def the_last_ranks_variables_come_without_pickle():
    model, inner, compression, _ = tape_run(5, m.SPARSE)
    with patch("cloudpickle.load", side_effect=AssertionError("a pickle was read")):
        dgc.join(compression)
    assert not m.replicas_differ([*m.values(model), *map(np.asarray, variables_of(inner))])


@case
def fit_goes_on_after_a_join():
    for make in (lambda: m.keras.optimizers.SGD(0.05, momentum=0.9), lambda: m.keras.optimizers.Adam(0.01)):
        model = m.make_model()
        compression = dgck.Compression.dgc(error_feedback="classic", **m.SPARSE)
        model.compile(dgck.DistributedOptimizer(make(), compression=compression), loss=m.loss_function)
        root = m.ROOT(0)
        for epoch in range(2):
            m.fit(model, batches(5), first=30 * epoch, callbacks=[root])
            assert dgck.join(compression) == MOST
            assert not m.replicas_differ(m.values(model))
            assert int(model.optimizer.iterations) == (epoch + 1) * batches(5, MOST)
            left = compression.residual_norm
            root.on_train_begin()
            assert compression.residual_norm == left > 0, "the callback has taken the variables for a loaded model's"
        m.fit(model, 2, first=90, callbacks=[root])
        assert not m.replicas_differ(m.values(model))


@case
def a_changed_learning_rate_is_a_warning():
    model, inner, compression, train = tape_run(1, m.SPARSE)
    dgc.join(compression)
    if hvd.rank() == MOST:
        inner.learning_rate = 0.01
        train(2)
    with m.warned("after this rank had joined") as told:
        dgc.join(compression)
    assert bool(told) == (hvd.rank() != MOST)
    assert np.isclose(float(inner.learning_rate), 0.01)
    train(2, start=90)
    assert not m.replicas_differ(m.values(model))


@case
def mistakes_are_errors_on_every_rank():
    m.assert_raises(lambda: dgc.join(None), "train one batch")
    m.assert_raises(lambda: dgc.join(dgc.Compression.dgc(momentum=0.0)), "train one batch")
    table = tf.Variable(tf.ones([50, 4]))
    compression = dgc.Compression.dgc([table], momentum=0.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table**2)
    hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [table])
    m.assert_raises(lambda: dgc.join(compression), "dgc's own tape or optimizer")


@case
def an_error_of_a_training_rank_reaches_the_joined_ones():
    _, _, compression, _ = tape_run(0, m.SPARSE)

    def act():
        if hvd.rank() == 0:
            dgc.join(compression)
        else:
            compression.engine.fail(dgc.LayoutError("a broken batch"))

    m.assert_raises(act, "a broken batch")
