"""Models whose variables a loader renames: compressors go on bit for bit, and patterns name the same variables."""

import horovod.tensorflow as hvd
import models as m
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.core.compressors import compressor_names

keras = m.keras
STEPS, MORE = 4, 3
LAST = ["sequential*/dense_1/*", "dense_1/*"]
"""A pattern of the names of a built model, and one of a loaded one's."""


def named_model():
    """Names that no counting of Keras changes."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, name=f"dense_{i}", activation="tanh") for i in range(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(3, name="dense_2")], name="sequential")
    model.build((None, 20))
    return model


@case
def compressors_in_fit_resume_bit_for_bit():
    resume("dgc", "onebit", "qsgd")


@case
def every_compressor_in_fit_resumes_bit_for_bit():
    resume(*compressor_names())


def resume(*names):
    folder = m.shared_folder()
    for name in names:
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        compression = getattr(dgc.Compression, name)(min_numel=64)
        model = m.compiled(inner, named_model(), compression=compression, run_eagerly=True)
        m.fit(model, STEPS, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / name)])
        m.save(model, folder / f"{name}.keras")
        m.fit(model, MORE, STEPS)
        again = keras.models.load_model(folder / f"{name}.keras")
        again.compile(again.optimizer, loss=m.loss_function, run_eagerly=True)
        m.fit(again, MORE, STEPS, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / name)])
        m.assert_equal(m.values(again), m.values(model), name)


@case
def patterns_name_the_same_variables_of_a_loaded_model():
    for pattern in LAST[: 1 if not m.LEGACY else 2]:
        compression = dgc.Compression.dgc(exclude=[pattern], min_numel=64, sparsity=0.9)
        model = m.compiled(keras.optimizers.SGD(0.05, momentum=0.9), named_model(), compression=compression)
        m.fit(model, 2)
        share = compression.describe()["sparsified_share"]
        loaded = m.reloaded(model)
        m.fit(loaded, 1, 2)
        assert loaded.optimizer.compression.describe()["sparsified_share"] == share
        again = m.reloaded(loaded)  # and once more
        m.fit(again, 1, 2)
        assert again.optimizer.compression.describe()["sparsified_share"] == share
        again.optimizer.compression.average(again.optimizer)
        state, model = again.optimizer.compression.state_dict(), m.reloaded(again)
        inner = keras.optimizers.SGD(0.05)
        tape = dgc.Compression.dgc(optimizer=inner, exclude=[pattern], min_numel=64, sparsity=0.9)
        tape.load_state_dict(state)
        m.tape_step(model, tape)
        assert tape.describe()["sparsified_share"] == share


@case
def a_pattern_that_fits_nothing_is_told_on_rank_0():
    for option in ("include", "exclude"):
        with m.warned("no variable fits") as told:
            compression = dgc.Compression.dgc(momentum=0.0, **{option: ["*dense*", "nowhere/*"]})
            compression.bind(named_model().trainable_variables)
        assert len(told) == (hvd.rank() == 0), told
        assert all(f"{option}='nowhere/*'" in text and "*dense*" not in text for text in told)


@case
def a_pattern_that_fits_nothing_is_told_once_however_often_the_model_is_loaded():
    with m.warned("no variable fits") as told:
        compression = dgc.Compression.dgc(exclude=["elsewhere/*"], min_numel=64)
        model = m.compiled(keras.optimizers.SGD(0.05), named_model(), compression=compression)
        m.fit(model, 1)
        for step in (1, 2):
            model = m.reloaded(model)
            m.fit(model, 1, step)
    assert len(told) == (hvd.rank() == 0), told
