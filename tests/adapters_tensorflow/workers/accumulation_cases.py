"""Gradients of several passes that are added up: by our wrapper, and by Keras itself."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


ACCUMULATING = {
    "sgd": lambda **o: keras.optimizers.SGD(m.short_schedule(), momentum=0.9, **o),
    "clipped": lambda **o: keras.optimizers.SGD(m.short_schedule(), momentum=0.9, clipnorm=0.05, **o),
    "adam": lambda **o: keras.optimizers.Adam(m.short_schedule(), **o),
    "overwriting": lambda **o: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, **o
    ),
}


@case("keras3")
def accumulating_optimizers_equal_plain_keras():
    for name, make in ACCUMULATING.items():
        # The same data on all ranks, so that Keras alone is a dense run.
        plain = m.fitted(make(gradient_accumulation_steps=3), wrapped=False, steps=12, rank=0)
        compression = dgc.Compression.dgc(**m.SPARSITY_0)
        own = make(gradient_accumulation_steps=3)
        model = m.fitted(own, compression, steps=12, rank=0, graph=name == "overwriting")
        m.assert_close(m.values(model), m.values(plain), 1e-5)
        assert compression.stats.steps == 12
        assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == 4
    m.assert_replicas(m.values(model))
    both = dict(compression=dgc.Compression.dgc(), backward_passes_per_step=2)
    m.assert_raises(lambda: dgck.DistributedOptimizer(make(gradient_accumulation_steps=2), **both), "choose one")


@case
def accumulated_passes_equal_one_large_batch():
    large = m.compile_model(None, learning_rate=0.05)
    m.fit(large, 10, batch_size=16)
    dense, compressed = (None, {}), (dgc.Compression.dgc(**m.SPARSITY_0), {})
    for compression, options in (dense, (None, {"run_eagerly": True}), compressed):
        model = m.compile_model(compression, learning_rate=0.05, **options, **m.TWO_PASSES)
        m.fit(model, 10)
        m.assert_close(m.values(model), m.values(large), 1e-5)
        assert int(model.optimizer.iterations) == 10
    assert compressed[0].stats.steps == 5


@case
def a_reset_forgets_gradients_that_were_added_up():
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    compression = dgc.Compression.dgc(momentum=0.0, rampup_begin_step=99)
    inner = keras.optimizers.SGD(1.0)
    optimizer = dgck.DistributedOptimizer(inner, compression=compression, backward_passes_per_step=2)

    def apply(value):
        optimizer.apply_gradients([(tf.fill(v.shape, tf.cast(value, v.dtype)), v) for v in variables])

    apply(1.0)
    apply(1.0)
    before = [np.asarray(v).copy() for v in variables]
    if hvd.rank() == 1:
        apply(100.0)  # one rank fails, in the user's code, before the others have come to this pass
    compression.reset()
    apply(1.0)
    for a, b in zip(before, variables, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    apply(1.0)
    for a, b in zip(before, variables, strict=True):
        np.testing.assert_allclose(a - 2.0, np.asarray(b), rtol=1e-5, atol=1e-5)
