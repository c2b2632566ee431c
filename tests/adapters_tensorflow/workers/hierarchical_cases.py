"""Ranks that send as one, in TensorFlow and Keras: on 4 ranks, in groups of 2 neighbours."""

import models as m
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


def fitted(compression):
    model = m.make_model()
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer=dgck.DistributedOptimizer(inner, compression=compression), loss=m.loss_function)
    m.fit(model, 10)
    return m.values(model)


@case
def sparsity_0_equals_dense_training():
    dense = fitted(None)
    m.assert_close(fitted(dgc.Compression.dgc(hierarchical=2, **m.SPARSITY_0)), dense, 1e-5)


@case
def replicas_stay_alike_behind_fit_and_a_tape():
    compression = dgc.Compression.dgc(hierarchical=2, **m.SPARSE)
    m.assert_replicas(fitted(compression))
    assert compression.describe()["nodes"] == 2
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    variables = m.raw(model.trainable_variables)
    compression = dgc.Compression.dgc(optimizer=inner, hierarchical=2, **m.SPARSE)

    @tf.function
    def one_step(x, y):
        with tf.GradientTape() as tape:
            loss = m.loss_function(y, model(x))
        tape = dgc.DistributedGradientTape(tape, compression=compression)
        inner.apply_gradients(zip(tape.gradient(loss, variables), model.trainable_variables, strict=True))

    for step in range(5):
        one_step(*map(tf.constant, m.batch(step)))
    m.assert_replicas(m.values(model))
    assert compression.describe()["nodes"] == 2


if __name__ == "__main__":
    run_cases()
