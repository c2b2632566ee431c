"""Seeing inside, on real ranks and in both Kerases: bits stay, writers write, and one that fails harms nobody."""

from __future__ import annotations

import contextlib
import functools
import gc
import shutil
import tempfile
import warnings
from pathlib import Path

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from scalar_writer import Writer
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.errors import ConfigError

keras = m.keras
OPTIONS = {"sparsity": 0.9, "min_numel": 64, "rampup_begin_step": 2}


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def loop(way, writer, *, graph, steps=7, every=1):
    """A custom loop with a log from its beginning; returns (values, what was seen last)."""
    model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    compression, library = m.compressor(way, model, inner, **OPTIONS)
    if writer is not None:
        compression.log_to(writer, every=every)
    one = m.stepper(model, inner, compression, library, graph)
    for step in range(steps):
        one(step)
    found = m.values(model), compression.inside
    compression.close()
    return found


@case
def a_tape_has_the_same_bits():
    """Horovod's and dgc's wrappers, in a graph and without; logged by all ranks, and by one."""
    for way, graph, everybody in (("stock", True, True), ("wrapper", True, False), ("wrapper", False, True)):
        expected, _ = loop(way, None, graph=graph)
        writer = Writer() if everybody or hvd.rank() == 0 else None
        found, look = loop(way, writer, graph=graph)
        same_bits(found, expected)
        if writer is None:
            assert len(look) == 0
            continue
        assert len(look) == 3, look
        assert len(look.left_out) == 3, look.left_out
        assert writer.steps == [2, 3, 4, 5, 6], writer.steps


def events(folder):
    """Rows of all event files: (tag, value, step)."""
    rows = []
    for path in sorted(Path(folder).glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                rows.append((value.tag, float(tf.make_ndarray(value.tensor)), event.step))
    return rows


@case
def a_writer_of_tf_summary_writes():
    """In a graph and without, on rank 0 alone; with TensorFlow's one thread for operations."""
    for graph in (True, False):
        folder = tempfile.mkdtemp(prefix="dgc-inside-")
        writer = tf.summary.create_file_writer(folder) if hvd.rank() == 0 else None
        _, look = loop("wrapper", writer, graph=graph, every=3)
        if writer is not None:
            writer.close()
            rows = events(folder)
            assert {step for _, _, step in rows} == {3, 6}, rows
            row = {tag: value for tag, value, step in rows if step == 6}
            for name, figures in look.items():
                for figure, value in figures.as_dict().items():
                    assert np.isclose(row.pop(f"compression.{figure}/{name}"), value)
            for figure, value in look.total.as_dict().items():
                assert np.isclose(row.pop(f"compression.total/{figure}"), value)
            assert not row
        shutil.rmtree(folder)


def fitted(optimizer, callbacks=(), steps=8, epochs=2, model=None, **arguments):
    """A model after ``fit()`` with validation, its history and its compressor."""
    model = model or m.make_model()
    model.compile(optimizer=optimizer, loss=m.loss_function, **arguments)
    given = [dgck.callbacks.BroadcastGlobalVariablesCallback(0), dgck.callbacks.MetricAverageCallback(), *callbacks]
    history = m.fit(model, steps, callbacks=given, epochs=epochs, validation_data=m.dataset(2, 5))
    owner = model.optimizer if hasattr(model.optimizer, "compression") else model.optimizer.inner_optimizer
    return m.values(model), history, owner


def wrapped(**options):
    passes = {"backward_passes_per_step": options.pop("passes", 1)}
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**OPTIONS, **options), **passes)


def momentum():
    return dgck.DGCMomentum(0.05, 0.9, 2, sparsity=[0.9], min_numel=64)


@functools.cache
def unlogged():
    return fitted(wrapped())[0]


def same_fit(make, count, everybody, **arguments):
    """``fit()`` with and without the callback, on all ranks or on rank 0 alone; ``count`` exchanges."""
    expected = fitted(make(), **arguments)[0] if arguments or make is not wrapped else unlogged()
    writer = Writer()
    logs = [dgck.callbacks.LogCompression(writer, every=1)] if everybody or hvd.rank() == 0 else []
    found, history, optimizer = fitted(make(), logs, **arguments)
    same_bits(found, expected)
    m.assert_replicas(found)
    if not logs:
        assert not any("compression" in name for name in history)
        return
    assert writer.steps == list(range(2, count)), writer.steps
    look = optimizer.compression.inside
    assert look.step == count - 1
    assert history["compression_density"][-1] == look.total.density
    assert len(history["compression_residual_norm"]) == 2
    assert optimizer.compression.engine._exchanges[0].probe is None  # turned off with fit()


@case
def fit_has_the_same_bits():
    same_fit(wrapped, 16, everybody=True)


@case
def a_log_of_the_users_rests_while_fit_has_one():
    """What ``log_to()`` was given writes again after ``fit()``, also where an exception ended an earlier one."""

    class Interrupted(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise InterruptedError("as from outside")

    optimizer = wrapped()
    users, fits = Writer(), Writer()
    optimizer.compression.log_to(users, every=1)
    log = dgck.callbacks.LogCompression(fits, every=1)
    model = m.compiled(optimizer, wrapped=False)
    for callbacks in ([log, Interrupted()], [log], []):
        with m.warned("log_to() was on") as shown:
            try:
                m.fit(model, 6, callbacks=callbacks)
            except InterruptedError:
                assert len(callbacks) == 2
        assert bool(shown) is bool(callbacks)
    assert fits.steps == list(range(2, 10)), fits.steps
    assert users.steps == list(range(10, 16)), users.steps
    optimizer.compression.close()


@case
def of_several_logs_the_one_that_began_last_writes():
    class Interrupted(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise InterruptedError("as from outside")

    optimizer = wrapped()
    users, first, second, third = Writer(), Writer(), Writer(), Writer()
    model = m.compiled(optimizer, wrapped=False)

    def fit(*callbacks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            m.fit(model, 2, callbacks=callbacks)

    log = dgck.callbacks.LogCompression
    fit()  # of the warm-up there is nothing to see
    optimizer.compression.log_to(users, every=1)
    fit(log(first, every=1), log(second, every=1))
    fit()
    assert (first.steps, second.steps, users.steps) == ([], [2, 3], [4, 5])
    left = log(first, every=1)
    with contextlib.suppress(InterruptedError):
        fit(left, Interrupted())  # and nobody drops the callback
    fit(log(second, every=1))
    del left
    gc.collect()
    fit()
    assert (first.steps, second.steps, users.steps) == ([6], [2, 3, 7, 8], [4, 5, 9, 10])

    class Relogged(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            optimizer.compression.log_to(third if batch == 0 else None, every=1)

    fit(log(first, every=1), Relogged())
    fit()
    assert (first.steps, users.steps, third.steps) == ([6], [4, 5, 9, 10], [11])
    optimizer.compression.close()


@case
def fit_with_the_optimizer_of_paddle_has_the_same_bits():
    same_fit(momentum, 16, everybody=False)


@case
def fit_with_several_steps_an_execution_has_the_same_bits():
    same_fit(wrapped, 16, everybody=False, steps_per_execution=4)


@case
def fit_with_several_passes_a_step_has_the_same_bits():
    same_fit(lambda: wrapped(passes=2), 8, everybody=True)


@case
def averaged_metrics_leave_the_figures_alone():
    """Whatever the order of callbacks, and on one rank alone: a sum of other names would not end."""
    logs = [dgck.callbacks.LogCompression(every=1)] if hvd.rank() == 1 else []
    model = m.compiled(wrapped(), wrapped=False)
    callbacks = [dgck.callbacks.BroadcastGlobalVariablesCallback(0), *logs, dgck.callbacks.MetricAverageCallback()]
    history = m.fit(model, 6, callbacks=callbacks, epochs=2)
    losses = hvd.allgather(tf.constant([history["loss"]]), name="losses").numpy()
    assert (losses == losses[0]).all()
    assert ("compression_residual_norm" in history) is bool(logs)


@case
def a_metric_of_the_users_is_averaged_whatever_it_is_called():
    logs = {"compression_error": float(hvd.rank()), "compression_density": float(hvd.rank())}
    dgck.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"compression_error": 0.5, "compression_density": float(hvd.rank())}


@case
def early_stopping_and_going_on_from_a_checkpoint():
    """In one script, as users have it: the same bits with the log."""
    folder = Path(tempfile.mkdtemp(prefix="dgc-inside-"))
    runs = []
    for logged in (False, True):
        own = folder / f"logged {logged}"

        def callbacks(patience, own=own, logged=logged):
            found = [
                dgck.callbacks.CompressionCheckpoint(str(own / "state")),
                keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=100.0),
            ]
            return found + [dgck.callbacks.LogCompression(Writer(), every=2)] * logged

        own.mkdir()
        model = m.make_model()
        _, history, _ = fitted(wrapped(), callbacks(1), epochs=5, model=model)
        assert len(history["loss"]) == 2
        saved = str(own / f"model{hvd.rank()}.keras")
        model.save(saved)
        del model
        resumed = dgck.load_model(saved)
        m.fit(resumed, 8, callbacks=[dgck.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks(9)])
        runs.append(m.values(resumed))
        look = resumed.optimizer.compression.inside
        assert (len(look) == 3) is logged
        if logged:
            assert look.step == 22
    same_bits(*runs)
    shutil.rmtree(folder)


@case
def a_writer_that_fails_ends_the_log_alone():
    """Also where warnings are errors: an exception within the step would leave it half done."""
    expected = unlogged()
    looped, _ = loop("wrapper", None, graph=True)
    for action in ("always", "error"):
        shown = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter(action, RuntimeWarning)
            warnings.showwarning = lambda message, *rest: shown.append(str(message))  # noqa: B023
            writers = [Writer(fails_at=4), Writer(fails_at=4)] if hvd.rank() == 1 else [Writer(), None]
            found, _, _ = fitted(wrapped(), [dgck.callbacks.LogCompression(writers[0], every=1)])
            in_loop, _ = loop("wrapper", writers[1], graph=True)
        same_bits(found, expected)
        same_bits(in_loop, looped)
        told = [text for text in shown if "disk full" in text]
        assert len(told) == 2 * (hvd.rank() == 1), (action, told)
        if hvd.rank() == 1:
            assert writers[0].steps == [2, 3]


@case
def what_cannot_be_logged():
    for wrong in (lambda: dgck.callbacks.LogCompression("runs"), lambda: dgc.Compression.dgc().log_to(object())):
        m.assert_raises(wrong, "add_scalar", kinds=(ConfigError,))
    m.assert_raises(lambda: dgck.callbacks.LogCompression(every=0), "every is 0", kinds=(ConfigError,))
    text = m.assert_raises(
        lambda: fitted(keras.optimizers.SGD(0.05), [dgck.callbacks.LogCompression()]), "LogCompression needs"
    )
    assert "DistributedOptimizer" in text
    m.assert_raises(
        lambda: fitted(dgck.DistributedOptimizer(keras.optimizers.SGD(0.05)), [dgck.callbacks.LogCompression()]),
        "LogCompression needs",
    )


@case
def nobody_to_exchange_with():
    """As in a job of one process: there is nothing to log, and it says so."""
    compression = dgc.Compression.dgc(process_set=m.alone(), **OPTIONS)
    writer = Writer()
    model = m.compiled(keras.optimizers.SGD(0.05, momentum=0.9), compression=compression)
    m.fit(model, 3, callbacks=[dgck.callbacks.LogCompression(writer, every=1)])
    assert writer.rows == []
    compression.log_to(writer)
    assert "no other ranks" in compression.inside.nothing


if __name__ == "__main__":
    run_cases()
