"""mixed_float16 on real ranks: one rank's overflow must be everybody's."""

import itertools

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras
(keras.mixed_precision.set_global_policy if m.LEGACY else keras.mixed_precision.set_dtype_policy)("mixed_float16")


def scale_of(optimizer):
    value = optimizer.loss_scale if m.LEGACY else optimizer.dynamic_scale
    return float(tf.convert_to_tensor(value))


@case
def an_overflow_on_one_rank_skips_the_step_on_all():
    wrapped = dgck.DistributedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), compression=dgc.Compression.dgc(**m.SPARSE)
    )
    for optimizer in (wrapped, dgck.DGCMomentum(0.01, 0.9, 0, sparsity=[0.9], min_numel=64)):
        model = m.make_model()
        model.compile(optimizer=optimizer, loss=m.loss_function)
        x, y = m.dataset(12)
        if hvd.rank() == 1:
            # Finite in float32, infinite in float16: the fifth batch of this rank alone.
            x[4 * 8], y[4 * 8] = 1e6, 1e6
        seen = []

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, seen=seen):
                seen.append(([v.copy() for v in m.values(self.model)], scale_of(self.model.optimizer)))

        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Watch()])
        assert len(seen) == 12
        for before, after in itertools.pairwise(seen):
            m.assert_replicas(after[0])
            m.assert_replicas([np.asarray(after[1])])
            same = all((a == b).all() for a, b in zip(before[0], after[0], strict=True))
            assert same is (after[1] < before[1]), "a step is skipped exactly where the scale was halved"
        assert all((a == b).all() for a, b in zip(seen[3][0], seen[4][0], strict=True)), "the fifth was not skipped"
        assert all(np.isfinite(v).all() for v in seen[-1][0])
        stats = optimizer.compression.stats
        assert stats.refused_steps >= 1
        assert (stats.steps, optimizer.compression.describe()["step"]) == (12, 12 - stats.refused_steps)


@case("keras3")
def a_loss_scale_optimizer_inside_is_taken_as_it_is():
    inner = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=128.0, dynamic_growth_steps=3
    )
    optimizer = dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**m.SPARSE))
    model = m.make_model()
    model.compile(optimizer=optimizer, loss=m.loss_function)
    assert model.optimizer is optimizer
    m.fit(model, 7)
    assert scale_of(model.optimizer) == 512.0
    m.assert_replicas(m.values(model))


@case
def the_scale_of_a_dense_run_goes_on():
    """Loaded and made distributed: from the initial scale on, every rank would skip one step after the other."""
    model = m.compiled(keras.optimizers.SGD(0.01, momentum=0.9), wrapped=False, run_eagerly=True)
    m.fit(model, 2, rank=0)
    own = model.optimizer
    counter = own._loss_scale.counter if m.LEGACY else own.step_counter
    (own._loss_scale._current_loss_scale if m.LEGACY else own.dynamic_scale).assign(64.0)
    counter.assign(5)
    for compression in (None, dgc.Compression.dgc(**m.SPARSE)):
        plain, loaded = m.reloaded(model), m.reloaded(model, dgck.load_model, compression=compression)
        # Legacy Keras does not save the scale in this format.
        assert scale_of(loaded.optimizer) == scale_of(plain.optimizer)
        assert m.LEGACY or scale_of(loaded.optimizer) == 64.0
        m.fit(loaded, 1, first=2, rank=0)
        if not m.LEGACY:
            assert scale_of(loaded.optimizer) == 64.0
            assert int(tf.convert_to_tensor(loaded.optimizer.step_counter)) == 6
        assert int(loaded.optimizer.iterations) == 3


@case("keras3")
def accumulation_works_with_loss_scaling():
    compression = dgc.Compression.dgc(**m.SPARSE)
    model = m.compile_model(compression, learning_rate=0.01, backward_passes_per_step=2)
    m.fit(model, 6)
    assert compression.stats.steps == 3
    m.assert_replicas(m.values(model))


@case("keras3")
def an_outer_loss_scale_optimizer_is_an_error():
    keras.mixed_precision.set_dtype_policy("float32")
    optimizer = dgck.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=dgc.Compression.dgc())
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    model = m.make_model()
    m.assert_raises(
        lambda: model.compile(optimizer=optimizer, loss=m.loss_function), "one rank's overflow would hang the job"
    )
