"""Keras runs that go on from a checkpoint, with every schedule; files that cannot be written or read."""

import errno
import inspect
import shutil
from unittest.mock import patch

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.core.state_file import load_state, save_state
from dgc.errors import DGCError

keras = m.keras
S = keras.optimizers.schedules

SCHEDULES = {
    "CosineDecay": lambda: S.CosineDecay(0.05, 4),
    "CosineDecayRestarts": lambda: S.CosineDecayRestarts(0.05, 2),
    "ExponentialDecay": lambda: S.ExponentialDecay(0.05, 2, 0.7),
    "InverseTimeDecay": lambda: S.InverseTimeDecay(0.05, 2, 0.5),
    "PiecewiseConstantDecay": lambda: S.PiecewiseConstantDecay([1, 2], [0.05, 0.02, 0.04]),
    "PolynomialDecay": lambda: S.PolynomialDecay(0.05, 4),
}


class ByHand(keras.callbacks.Callback):
    """A user's own schedule of the momentum, which a checkpoint holds as it is after the batch."""

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        steps = int(tf.convert_to_tensor(optimizer.iterations))
        getattr(optimizer, "inner_optimizer", optimizer).momentum = 0.8 + 0.02 * steps


CALLBACKS = {
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=100.0),
    "momentum by hand": ByHand,
}


def remove(folder):
    m.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def on_every_rank(action, *parts):
    """``action`` must fail on all ranks, with these parts in the message on each."""
    try:
        text = m.assert_raises(action, *parts, kinds=(DGCError, FileNotFoundError))
    except Exception as wrong:
        text = f"wrong: {wrong}"
    bad = hvd.allgather(tf.constant([text.startswith("wrong: ")]), name="outcome").numpy()
    assert not bad.any(), f"{bad}: {text}"


def compiled(schedule=0.05, seed=1, width=16, **options):
    return m.compile_model(
        dgc.Compression.dgc(**{**m.SPARSE, **options}),
        optimizer="nesterov",
        model=m.make_model(seed, width),
        learning_rate=schedule,
        run_eagerly=True,
    )


@case
def schedules_and_callbacks_go_on_from_a_checkpoint():
    go_on("CosineDecayRestarts", *CALLBACKS)


@case
def every_schedule_of_keras_goes_on_from_a_checkpoint():
    made = {n for n, s in inspect.getmembers(S, inspect.isclass) if issubclass(s, S.LearningRateSchedule)}
    assert made - {"LearningRateSchedule"} <= set(SCHEDULES), "a schedule of Keras is not tested"
    go_on(*SCHEDULES)


def go_on(*names):
    folder = m.shared_folder()
    for name in names:
        make = SCHEDULES.get(name, lambda: 0.05)
        own = CALLBACKS.get(name, lambda: None)
        callbacks = [c for c in (own(),) if c is not None]
        straight = compiled(make())
        m.fit(straight, 2, callbacks=[*callbacks, dgck.callbacks.CompressionCheckpoint(folder / name)])
        m.save(straight, folder / "model.keras")
        resumed = keras.models.load_model(folder / "model.keras")
        resumed.compile(optimizer=resumed.optimizer, loss=m.loss_function, run_eagerly=True)
        m.fit(straight, 2, first=2, callbacks=callbacks)
        m.fit(resumed, 2, first=2, callbacks=[*callbacks, dgck.callbacks.CompressionCheckpoint(folder / name)])
        m.assert_equal(m.values(straight), m.values(resumed), name)
    remove(folder)


def not_finite(path):
    state = load_state(path)
    next(iter(state["parameters"].values()))["u"][3] = np.nan
    save_state(path, state)


DAMAGES = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-300]), "cut off.npz is no state of a compressor"),
    "not finite": (not_finite, "not finite"),
    "of another model": (lambda path: shutil.copy(path.with_name("wide.npz"), path), "belongs to another model"),
}


@case
def a_file_that_cannot_be_loaded_is_an_error_on_every_rank():
    folder = m.shared_folder()
    for name, width in (("good", 16), ("wide", 32)):
        m.fit(compiled(width=width), 2, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / name)])
    other = compiled(seed=2)
    other.optimizer.iterations.assign(2)
    before = m.values(other)
    for name, (damage, text) in DAMAGES.items():
        if hvd.rank() == 0:
            shutil.copy(folder / "good.npz", folder / f"{name}.npz")
            damage(folder / f"{name}.npz")
        m.barrier()
        reading = dgck.callbacks.CompressionCheckpoint(folder / name)
        on_every_rank(lambda: m.fit(other, 1, callbacks=[reading]), text)  # noqa: B023
        m.assert_equal(m.values(other), before)
        assert other.optimizer.compression.residual_norm == 0, "no rank has taken its state over"
    remove(folder)


@case
def a_full_disk_leaves_the_old_file():
    folder = m.shared_folder()
    model, path = compiled(), folder / "state.npz"
    m.fit(model, 2, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / "state")])
    before, again = path.read_bytes(), [dgck.callbacks.CompressionCheckpoint(folder / "state")]
    with patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        told = "state.npz could not be written: No space left on device"
        on_every_rank(lambda: m.fit(model, 1, first=2, callbacks=again), told)
    m.barrier()
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]
    m.fit(model, 1, first=3, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / "state")])
    assert load_state(path)["step"] == 4
    remove(folder)


def lost_in(model, first, *callbacks):
    """What the warning of a lost state names in two more steps; None without one."""
    model.run_eagerly = True  # which a loaded model is not
    with m.warned("nothing was loaded into the compressor") as texts:
        m.fit(model, 2, first=first, callbacks=callbacks)
    assert len(texts) <= (hvd.rank() == 0), texts
    assert all("CompressionCheckpoint keeps both" in text for text in texts)
    said = hvd.broadcast_object("".join(texts), name="said")
    return said.partition("residuals: ")[2].partition(" is lost")[0] or None


@case
def a_model_that_goes_on_without_the_compressor_s_state_says_so():
    folder = m.shared_folder()
    paddle = m.make_model(width=16)
    paddle.compile(dgck.DGCMomentum(0.05, 0.9, 0, num_trainers=hvd.size()), "mse")
    models = {
        "momentum": compiled(**m.SPARSITY_0),
        "momentum and what was not sent yet": compiled(),
        "momentum ": paddle,
    }
    for lost, model in models.items():
        keep = dgck.callbacks.CompressionCheckpoint(folder / "state")
        assert lost_in(model, 0, keep) is None
        path = folder / "model.keras"
        m.save(model, path)
        assert lost_in(model, 2) is None, "nothing was loaded"
        loaded = keras.models.load_model(path)
        assert lost_in(loaded, 2) == lost.strip()
        assert lost_in(loaded, 4) is None, "once is enough"
        assert lost_in(keras.models.load_model(path), 2, keep) is None, "the callback has brought it back"
        m.save(loaded, path)  # and of a model that was loaded, and saved once more
        assert lost_in(keras.models.load_model(path), 4) == lost.strip()
    remove(folder)


@case("keras3")
def a_model_that_steps_ahead_has_lost_nothing_after_an_average():
    folder, model = m.shared_folder(), m.make_model(width=16)
    optimizer = dgck.DistributedOptimizer(keras.optimizers.Adam(), compression=dgc.Compression.dgc(**m.SPARSE))
    model.compile(optimizer, "mse")
    keep = dgck.callbacks.CompressionCheckpoint(folder / "state")
    for first, callbacks, lost in ((0, [], "what was not sent yet"), (2, [keep], None)):
        assert lost_in(model, first, *callbacks) is None
        m.save(model, folder / "model.keras")
        assert lost_in(keras.models.load_model(folder / "model.keras"), first + 2) == lost
    remove(folder)


@case
def weights_loaded_between_two_fits_say_what_is_lost():
    folder = m.shared_folder()
    model, root = compiled(), m.ROOT(0)
    keep = dgck.callbacks.CompressionCheckpoint(folder / "state")
    path = str(folder / f"rank{hvd.rank()}.weights.h5")
    assert lost_in(model, 0, root, keep) is None
    model.save_weights(path)
    assert lost_in(model, 2, root) is None
    model.load_weights(path)
    assert lost_in(model, 2, root) == "momentum and what was not sent yet"
    model.optimizer.compression.reset()
    assert lost_in(model, 4, root) is None
    remove(folder)


@case
def a_dense_run_s_model_has_lost_nothing():
    model = m.make_model(width=16)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    m.fit(model, 2, rank=0)
    inner = model.optimizer
    model.compile(dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**m.SPARSE)), "mse")
    assert lost_in(model, 2) is None
    assert model.optimizer.compression.residual_norm > 0
