"""Ranks that send as one, in TensorFlow and Keras: on 4 ranks, in groups of 2 neighbours."""

import models as m
from worker_tools import case, run_cases

import dgc.tensorflow as dgc

keras = m.keras


def fitted(compression):
    model = m.compiled(keras.optimizers.SGD(0.05, momentum=0.9), compression=compression)
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
    compression = dgc.Compression.dgc(optimizer=inner, hierarchical=2, **m.SPARSE)
    one = m.stepper(model, inner, compression)
    for step in range(5):
        one(step)
    m.assert_replicas(m.values(model))
    assert compression.describe()["nodes"] == 2


if __name__ == "__main__":
    run_cases()
