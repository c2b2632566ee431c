"""Layers that are frozen in mid-training, by every front end: they stay, and go on with their momentum when thawed."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras
STEPS = 4


def by_fit(compression, **options):
    """A model, and a function that trains it from a step on, with what is trainable then."""
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(dgck.DistributedOptimizer(inner, compression=compression), loss=m.loss_function, **options)

    def train(first):
        model.compile(model.optimizer, loss=m.loss_function, **options)
        m.fit(model, STEPS, first)

    return model, train


def by_tape(compression, library=dgc, graph=True):
    """The gradients of all variables are asked for; those of frozen layers are None."""
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    variables = m.raw(model.trainable_variables)
    if compression is not None:
        options = compression.given_options
        named = () if library is dgc else (variables,)
        compression = dgc.Compression.dgc(*named, optimizer=inner, **options)

    def train(first):
        frozen = {id(v) for layer in model.layers if not layer.trainable for v in m.raw(layer.weights)}

        def step(x, y):
            def loss():
                outputs = x
                for layer in model.layers:
                    kernel, bias = m.raw(layer.weights)
                    kernel, bias = (tf.stop_gradient(v) if id(v) in frozen else v for v in (kernel, bias))
                    outputs = layer.activation(outputs @ kernel + bias)
                return m.loss_function(y, outputs)

            options = {} if library is dgc else {"groups": 1}
            gradients = m.reduced(loss, variables, compression, library if compression else hvd, **options)
            pairs = zip(gradients, model.weights, strict=True)
            inner.apply_gradients([(g, v) for g, v in pairs if g is not None])

        run = tf.function(step) if graph else step
        for i in range(first, first + STEPS):
            run(*map(tf.constant, m.batch(i)))

    return model, train


FRONT_ENDS = {
    "fit": by_fit,
    "eager fit": lambda compression: by_fit(compression, run_eagerly=True),
    "tape": by_tape,
    "eager tape": lambda compression: by_tape(compression, graph=False),
    "Horovod's tape": lambda compression: by_tape(compression, hvd),
}


def train(make, compression):
    """Train, freeze a layer, train, thaw it, train; its values at each change and all in the end."""
    model, go = make(compression)
    go(0)
    before = [np.asarray(v).copy() for v in m.raw(model.layers[1].weights)]
    model.layers[1].trainable = False
    go(STEPS)
    after = [np.asarray(v).copy() for v in m.raw(model.layers[1].weights)]
    model.layers[1].trainable = True
    go(2 * STEPS)
    return before, after, m.values(model)


@case
def a_frozen_layer_stays_and_goes_on_as_dense_when_it_is_thawed():
    _, _, dense = train(FRONT_ENDS["eager tape"], None)
    for make in FRONT_ENDS.values():
        before, after, found = train(make, dgc.Compression.dgc(**m.SPARSITY_0))
        m.assert_equal(before, after)
        m.assert_close(found, dense, 1e-5)


@case
def no_residual_moves_a_frozen_layer_and_none_is_lost():
    for make in (by_fit, by_tape):
        before, after, found = train(make, dgc.Compression.dgc(**m.SPARSE))
        m.assert_equal(before, after)
        m.assert_replicas(found)
    compression = dgc.Compression.dgc(**m.SPARSE)
    model, go = by_fit(compression, run_eagerly=True)
    go(0)
    saved = compression.state_dict(own=True)["parameters"]
    model.layers[1].trainable = False
    go(STEPS)
    state = compression.state_dict(own=True)["parameters"]
    same = [n for n in saved if all(np.array_equal(saved[n][k], state[n][k], equal_nan=True) for k in saved[n])]
    assert len(same) == 2, same  # the kernel and the bias of the frozen layer


@case
def a_state_saved_while_a_layer_is_frozen_resumes_bit_for_bit():
    compression = dgc.Compression.dgc(**m.SPARSE)
    model, go = by_fit(compression, run_eagerly=True)
    go(0)
    model.layers[1].trainable = False
    go(STEPS)
    compression.average(model.optimizer)
    weights, state = model.get_weights(), compression.state_dict()
    go(2 * STEPS)
    model.layers[1].trainable = True
    go(3 * STEPS)
    wanted = m.values(model)
    resumed = dgc.Compression.dgc(**m.SPARSE)
    again, go = by_fit(resumed, run_eagerly=True)
    again.optimizer.build(again.trainable_variables)
    again.optimizer.bind(again.trainable_variables)
    again.set_weights(weights)
    resumed.load_state_dict(state)
    again.layers[1].trainable = False
    go(2 * STEPS)
    again.layers[1].trainable = True
    go(3 * STEPS)
    m.assert_equal(m.values(again), wanted)


@case
def a_layer_that_one_rank_alone_freezes_is_an_error_on_all():
    """Horovod's own classes meet before they ask the compressor: there ranks wait, as with dense gradients."""
    for make in (make for name, make in FRONT_ENDS.items() if "Horovod" not in name):
        compression = dgc.Compression.dgc(**m.SPARSITY_0)
        model, go = make(compression)
        go(0)
        before = model.get_weights()
        model.layers[1].trainable = hvd.rank() != 1
        m.assert_raises(lambda: go(STEPS), "'without a gradient' is [] on rank 0 and [", "kernel", "frozen variables")  # noqa: B023
        m.assert_equal(before, model.get_weights())
