"""The root's variables reach all ranks, whatever some of them have trained or loaded before."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.tensorflow.adoption import optimizer_variables

keras = m.keras


@case
def weights_that_only_the_root_loads_leave_nothing_of_the_abandoned_run():
    model = m.eager(keras.optimizers.SGD(0.05, momentum=0.9), dgc.Compression.dgc(**m.SPARSE))
    again, seen = m.ROOT(0), []
    start = m.values(model)
    m.fit(model, 4, callbacks=[again])
    engine = model.optimizer.compression.engine
    assert engine.residual_norm() > 0
    if hvd.rank() == 0:
        model.set_weights(start)

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append((engine.residual_norm(), [v.copy() for v in m.values(model)]))

    m.fit(model, 1, callbacks=[again, Watch()])
    assert seen[0][0] == 0.0
    m.assert_equal(seen[0][1], start)
    m.assert_replicas(m.values(model))
    # A fit that goes on keeps what it has.
    m.fit(model, 1, callbacks=[again, Watch()])
    assert seen[1][0] > 0.0


@case
def replicas_are_compared_again_after_a_broadcast():
    model = m.eager(keras.optimizers.SGD(0.05, momentum=0.9), dgc.Compression.dgc(**m.SPARSE))
    m.fit(model, 3, callbacks=[m.ROOT(0)])
    weight = m.raw(model.trainable_variables)[0]

    class Spoil(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            weight.assign_add(tf.ones_like(weight) * float(hvd.rank()))

    m.assert_raises(lambda: m.fit(model, 2, callbacks=[m.ROOT(0), Spoil()]), "do not train the same model")


@case
def the_root_s_weights_and_averaged_metrics_reach_everybody():
    model = m.make_model(seed=1 + hvd.rank())
    compression = dgc.Compression.dgc(**m.SPARSE)
    m.compile_model(compression, model=model, run_eagerly=True)
    assert m.replicas_differ(m.values(model))
    history = m.fit(model, 6, callbacks=[m.ROOT(0), dgck.callbacks.MetricAverageCallback()])
    m.assert_replicas(m.values(model))
    m.assert_replicas([np.asarray(history["loss"], np.float64)])


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "AdamW": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
}


@case(optimizer=OPTIMIZERS)
def only_one_rank_loads_the_model(optimizer):
    """Keras names a loaded model's variables otherwise than a built one's, and its learning rate is its own."""
    folder, make = m.shared_folder(), OPTIMIZERS[optimizer]
    model = m.compiled(make(), compression=dgc.Compression.dgc(**m.SPARSE))
    m.fit(model, 4)
    model.optimizer.learning_rate = 0.025
    checkpoint = dgck.callbacks.CompressionCheckpoint(folder / "dgc-{epoch:02d}")
    m.fit(model, 4, first=4, callbacks=[checkpoint])
    path = folder / "model.keras"
    m.save(model, path)
    built = m.compiled(make(), m.make_model(7), compression=dgc.Compression.dgc(**m.SPARSE))
    again = keras.models.load_model(path) if hvd.rank() == 0 else built
    restoring = dgck.callbacks.CompressionCheckpoint(folder / "dgc-{epoch:02d}", save_freq=1000)
    m.fit(again, 4, first=8, callbacks=[m.ROOT(0), restoring])
    m.fit(model, 4, first=8)
    model.optimizer.compression.average(model.optimizer)  # as the callback does at the end of the other fit()
    found, wanted = (
        [*m.values(one), *map(np.asarray, m.raw(optimizer_variables(one.optimizer)))] for one in (again, model)
    )
    m.assert_equal(found, wanted)
    m.assert_replicas(found)


@case
def only_one_rank_loads_a_model_that_the_others_cannot_go_on_with():
    """One that lacks options, and one while the others go on with a compressor that has made steps."""
    folder = m.shared_folder()
    options = {} if hvd.rank() else {"loss_scale": lambda: 1.0}
    saved = m.compile_model(dgc.Compression.dgc(**options), run_eagerly=True)
    whole = m.compile_model(dgc.Compression.dgc(**m.SPARSE))
    for model in (saved, whole):
        m.fit(model, 1)
    m.save(saved, folder / "lacks.keras")
    m.save(whole, folder / "whole.keras")
    fresh = m.compile_model(dgc.Compression.dgc(), model=m.make_model())
    for name, others, text in (("lacks", fresh, "which cannot be saved"), ("whole", whole, "load it on every rank")):
        model = others if hvd.rank() else keras.models.load_model(folder / f"{name}.keras")
        told = m.assert_raises(lambda: m.fit(model, 1, callbacks=[m.ROOT(0)]), text)  # noqa: B023
        assert "rank 0" in told or hvd.rank() == 0
    m.fit(whole, 1)
    m.assert_replicas(m.values(whole))


@case
def a_model_without_variables_is_broadcast_after_its_first_step():
    for steps, eager in ((1, False), (1, True), (4, False)):
        keras.utils.set_random_seed(1 + hvd.rank())
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)])
        options = {"run_eagerly": eager, "steps_per_execution": steps}
        m.compiled(keras.optimizers.SGD(0.05, momentum=0.9), model, compression=dgc.Compression.dgc(), **options)
        if steps == 1:
            m.fit(model, 6, callbacks=[m.ROOT(0)])
            m.assert_replicas(m.values(model))
        else:
            m.assert_raises(lambda: m.fit(model, 8, callbacks=[m.ROOT(0)]), "build the model before fit()")  # noqa: B023


@case
def a_broadcast_goes_by_place_and_refuses_models_that_differ():
    if hvd.rank() == 0:
        keras.optimizers.SGD(0.1)  # Keras numbers its optimizers: from here on names differ between the ranks
    model = m.make_model(seed=hvd.rank())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    callback = m.ROOT(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert not m.replicas_differ(m.values(model))
    other = m.make_model(width=32 + 8 * hvd.rank())
    other.compile(keras.optimizers.SGD(0.1), "mse")
    callback = m.ROOT(0)
    callback.set_model(other)
    m.assert_raises(callback.on_train_begin, "variables differ between ranks: number 0 is '", "kernel' (20, 32)")
