"""Keras' fit on real ranks; the same cases under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under legacy Keras."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.core.state_file import load_state

keras = m.keras


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
    m.assert_close(found, dense, 1e-5)


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
def a_checkpoint_added_in_a_second_fit_and_one_every_few_steps():
    folder = m.shared_folder()
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05)
    model.compile(optimizer=model.optimizer, loss=m.loss_function, steps_per_execution=4)
    m.fit(model, 8)
    often = dgck.callbacks.CompressionCheckpoint(folder / "often", save_freq=4)
    m.fit(model, 8, first=8, callbacks=[often])
    state = load_state(folder / "often.npz")
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
    for eager, own, options in ((False, 0, m.SPARSE), (True, 1, {"rampup_begin_step": 1000})):
        compression = dgc.Compression.dgc(**options)
        model = m.compile_model(compression, learning_rate=0.05, run_eagerly=eager)
        stop = StopAt(1 if hvd.rank() == own else 9)
        m.assert_raises(
            lambda: m.fit(model, 2, callbacks=[m.ROOT(0), stop], epochs=4),  # noqa: B023
            f"rank {own} has ended fit()",
            "MetricAverageCallback",
        )


@case
def a_fit_that_a_callback_ends_on_all_ranks_changes_nothing():
    for stop_at, epochs in ((1, 4), (1, 2)):
        found = []
        for callbacks in ([], [StopAt(stop_at if hvd.rank() or epochs > 2 else 9)]):
            compression = dgc.Compression.dgc(**m.SPARSE)
            model = m.compile_model(compression, learning_rate=0.05)
            m.fit(model, 2, callbacks=[m.ROOT(0), *callbacks], epochs=epochs if callbacks else 2)
            assert compression.stats.steps == 4
            m.fit(model, 2, 2, callbacks=[m.ROOT(0)])
            found.append(m.values(model))
        m.assert_equal(*found)


@case
def evaluate_and_predict_talk_to_nobody():
    model = m.compile_model(dgc.Compression.dgc(**m.SPARSE))
    m.fit(model, 3)
    if hvd.rank() == 0:
        x, y = m.batch(0)
        assert np.isfinite(model.evaluate(x, y, verbose=0))
        assert model.predict(x, verbose=0).shape == (8, 3)
    m.barrier()
