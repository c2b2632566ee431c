"""Keras' fit on real ranks; the same cases under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under legacy Keras."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.core.state_file import load_state
from dgc.tensorflow.adoption import optimizer_variables

keras = m.keras
ROOT = dgck.callbacks.BroadcastGlobalVariablesCallback


@case
def accumulated_passes_equal_one_large_batch():
    dense = m.compile_model(None, learning_rate=0.05)
    m.fit(dense, 10, batch_size=16)
    compression = dgc.Compression.dgc(**m.SPARSITY_0)
    model = m.compile_model(
        compression, learning_rate=0.05, backward_passes_per_step=2, average_aggregated_gradients=True
    )
    m.fit(model, 10)
    m.assert_close(m.values(model), m.values(dense), 1e-5)
    assert compression.stats.steps == 5
    assert int(model.optimizer.iterations) == 10


@case
def the_root_s_weights_and_averaged_metrics_reach_everybody():
    model = m.make_model(seed=1 + hvd.rank())
    compression = dgc.Compression.dgc(**m.SPARSE)
    m.compile_model(compression, model=model, run_eagerly=True)
    assert m.replicas_differ(m.values(model))
    history = m.fit(model, 6, callbacks=[ROOT(0), dgck.callbacks.MetricAverageCallback()])
    m.assert_replicas(m.values(model))
    m.assert_replicas([np.asarray(history["loss"], np.float64)])


@case
def warm_up_and_schedule_callbacks_equal_dense():
    def run(compression):
        model = m.compile_model(compression, learning_rate=0.05)
        callbacks = [
            dgck.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=2),
            dgck.callbacks.LearningRateScheduleCallback(0.05, 0.5, start_epoch=2),
        ]
        m.fit(model, 6, callbacks=callbacks, epochs=4)
        rate = float(tf.convert_to_tensor(model.optimizer.learning_rate))
        return m.values(model), rate

    dense, rate = run(None)
    assert abs(rate - 0.025) < 1e-7, rate
    found, _ = run(dgc.Compression.dgc(**m.SPARSITY_0))
    m.assert_close(found, dense, m.TOLERANCE["zero"])


@case
def a_reloaded_run_whose_residuals_are_missing_is_refused():
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05)
    m.fit(model, 1)
    again = m.reloaded(model)
    m.assert_raises(
        lambda: m.fit(again, 2, callbacks=[dgck.callbacks.CompressionCheckpoint("never-written")]),
        "restore the model and the compressor from the same moment",
    )


@case
def only_one_rank_loads_the_model():
    """Keras names a loaded model's variables otherwise than a built one's, and its learning rate is its own."""
    folder = m.shared_folder()
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05)
    m.fit(model, 4)
    model.optimizer.learning_rate = 0.025
    checkpoint = dgck.callbacks.CompressionCheckpoint(folder / "dgc-{epoch:02d}")
    m.fit(model, 4, first=4, callbacks=[checkpoint])
    path = folder / "model.keras"
    m.save(model, path)
    built = m.compile_model(dgc.Compression.dgc(**m.SPARSE), model=m.make_model(7), learning_rate=0.05)
    again = keras.models.load_model(path) if hvd.rank() == 0 else built
    restoring = dgck.callbacks.CompressionCheckpoint(folder / "dgc-{epoch:02d}")
    m.fit(again, 4, first=8, callbacks=[ROOT(0), restoring])
    m.fit(model, 4, first=8)
    m.assert_replicas(m.values(again))
    for a, b in zip(m.values(model), m.values(again), strict=True):
        np.testing.assert_array_equal(a, b)


@case
def replicas_are_identical_when_one_rank_alone_loads_a_model_with_decay():
    folder = m.shared_folder()
    inner = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    model = m.compiled(inner, compression=dgc.Compression.dgc(**m.SPARSE), run_eagerly=True)
    m.fit(model, 4)
    m.save(model, folder / "model.keras")
    inner = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    fresh = m.compiled(inner, m.make_model(7), compression=dgc.Compression.dgc(**m.SPARSE), run_eagerly=True)
    again = keras.models.load_model(folder / "model.keras") if hvd.rank() == 0 else fresh
    again.run_eagerly = True
    m.fit(again, 4, first=4, callbacks=[ROOT(0)])
    m.assert_replicas([*m.values(again), *map(np.asarray, m.raw(optimizer_variables(again.optimizer)))])


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
        told = m.assert_raises(lambda: m.fit(model, 1, callbacks=[ROOT(0)]), text)  # noqa: B023
        assert "rank 0" in told or hvd.rank() == 0
    m.fit(whole, 1)
    m.assert_replicas(m.values(whole))


@case
def a_checkpoint_added_in_a_second_fit_and_one_every_few_steps():
    folder = m.shared_folder()
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05)
    model.compile(optimizer=model.optimizer, loss=m.loss_function, steps_per_execution=4)
    m.fit(model, 8)
    often = dgck.callbacks.CompressionCheckpoint(folder / "often", save_freq=4)
    m.fit(model, 8, first=8, callbacks=[often])
    state = load_state(folder / f"often.rank{hvd.rank()}.npz")
    assert state["step"] == 16


class StopAt(keras.callbacks.Callback):
    """As EarlyStopping does."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.epoch


@case
def a_fit_that_a_callback_ends_on_one_rank_is_an_error_on_all():
    for eager, own, options in ((False, 0, m.SPARSE), (True, 1, m.BEFORE_RAMPUP)):
        compression = dgc.Compression.dgc(**options)
        model = m.compile_model(compression, learning_rate=0.05, run_eagerly=eager)
        stop = StopAt(1 if hvd.rank() == own else 9)
        m.assert_raises(
            lambda: m.fit(model, 2, callbacks=[ROOT(0), stop], epochs=4),  # noqa: B023
            f"ended fit() on rank {own}",
            "MetricAverageCallback",
        )


@case
def a_fit_that_a_callback_ends_on_all_ranks_changes_nothing():
    for stop_at, epochs in ((1, 4), (1, 2)):
        found = []
        for callbacks in ([], [StopAt(stop_at if hvd.rank() or epochs > 2 else 9)]):
            compression = dgc.Compression.dgc(**m.SPARSE)
            model = m.compile_model(compression, learning_rate=0.05)
            m.fit(model, 2, callbacks=[ROOT(0), *callbacks], epochs=epochs if callbacks else 2)
            assert compression.stats.steps == 4
            m.fit(model, 2, 2, callbacks=[ROOT(0)])
            found.append(m.values(model))
        for a, b in zip(*found, strict=True):
            np.testing.assert_array_equal(a, b)


@case
def a_model_without_variables_is_broadcast_after_its_first_step():
    for steps, eager in ((1, False), (1, True), (4, False)):
        keras.utils.set_random_seed(1 + hvd.rank())
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)])
        options = {"run_eagerly": eager, "steps_per_execution": steps}
        m.compiled(keras.optimizers.SGD(0.05, momentum=0.9), model, compression=dgc.Compression.dgc(), **options)
        if steps == 1:
            m.fit(model, 6, callbacks=[ROOT(0)])
            m.assert_replicas(m.values(model))
        else:
            m.assert_raises(lambda: m.fit(model, 8, callbacks=[ROOT(0)]), "build the model before fit()")  # noqa: B023


@case
def evaluate_and_predict_talk_to_nobody():
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE))
    m.fit(model, 3)
    if hvd.rank() == 0:
        x, y = m.batch(0)
        assert np.isfinite(model.evaluate(x, y, verbose=0))
        assert model.predict(x, verbose=0).shape == (8, 3)
    m.barrier()


if __name__ == "__main__":
    run_cases()
