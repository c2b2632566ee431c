"""Keras 3's Adam and its kin: their first moment is the compressor's once entries are selected, and theirs before."""

import functools
import tempfile

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
from dgc.core.config import bias_correction
from dgc.core.state_file import load_state, save_state

keras = m.keras
KIN = {
    "Adam": keras.optimizers.Adam,
    "AdamW": keras.optimizers.AdamW,
    "Nadam": keras.optimizers.Nadam,
    "Adamax": keras.optimizers.Adamax,
}
STEPS = 12


def by_tape(make, options, graph=False, steps=STEPS):
    model, inner = m.make_model(), make(0.003)
    compression, library = m.compressor("dense" if options is None else "wrapper", model, inner, **(options or {}))
    one = m.stepper(model, inner, compression, library, graph)
    for step in range(steps):
        one(step)
    return model, inner, compression


def by_fit(make, options, steps=STEPS):
    compression = None if options is None else dgc.Compression.dgc(error_feedback="classic", **options)
    inner = make(0.003)
    model = m.compiled(inner, compression=compression, run_eagerly=False)
    m.fit(model, steps)
    return model, inner, compression


@case
def before_the_selection_training_equals_dense():
    for name, make in KIN.items():
        wanted = m.values(by_tape(make, None)[0])
        often = name == "AdamW"
        for options in (m.SPARSITY_0, {"rampup_begin_step": 50})[: 1 + often]:
            ways = (by_fit, functools.partial(by_tape, graph=True)) if often else (by_tape,)
            for by in ways:
                model, inner, compression = by(make, options)
                m.assert_close(m.values(model), wanted, 1e-5)
                assert inner.get_config()["beta_1"] == make().beta_1, name
                compression.close()


@case
def the_moment_moves_at_the_first_selection_in_a_traced_step_too():
    options = {**m.SPARSE, "rampup_begin_step": 4, "sparsity": 0.9, "momentum_masking": False, "small": "float32"}
    for name, make in KIN.items():
        ways = (by_fit, functools.partial(by_tape, graph=True)) if name == "Adam" else (by_tape,)
        for by in ways:
            model, inner, compression = by(make, options, steps=4)
            assert float(inner.beta_1) == np.float32(0.9)
            m.assert_replicas(m.values(model))
            compression.close()
            model, inner, compression = by(make, options, steps=5)
            assert float(inner.beta_1) == 0.0, "the optimizer would average once more"
            assert inner.get_config()["beta_1"] == 0.9
            # u is the moment of five steps, of which four were dense, with its bias corrected.
            moment = [np.zeros(v.shape, np.float32) for v in model.trainable_variables]
            copy = by_tape(make, None, steps=0)[0]
            reference = make(0.003)
            for step in range(5):
                ranks = [m.own_gradients(copy, *map(tf.constant, m.batch(step, r))) for r in range(hvd.size())]
                means = [sum(np.asarray(g[i]) for g in ranks) / hvd.size() for i in range(len(moment))]
                moment = [0.9 * a + 0.1 * g for a, g in zip(moment, means, strict=True)]
                reference.apply_gradients(zip(map(tf.constant, means), copy.trainable_variables, strict=True))
            compression.average(inner)
            for entry, mean in zip(compression.state_dict()["parameters"].values(), moment, strict=True):
                wanted = mean.ravel() / bias_correction(0.9, 5)
                np.testing.assert_allclose(entry["u"], wanted, rtol=1e-3, atol=2e-4, err_msg=name)
            compression.close()


@case
def replicas_are_identical_while_entries_are_selected():
    for make in KIN.values():
        for by in (by_tape, by_fit) if make is keras.optimizers.AdamW else (by_tape,):
            model, _, compression = by(make, {**m.SPARSE, "sparsity": 0.95}, steps=STEPS)
            m.assert_replicas(m.values(model))
            assert 0.03 < compression.stats.last.density < 0.07
            assert all(np.isfinite(v).all() for v in m.values(model))
            compression.close()


@case
def a_resumed_run_goes_on_bit_for_bit():
    for begin in (0, 8):
        options = {**m.SPARSE, "sparsity": 0.9, "rampup_begin_step": begin}
        model, inner, compression = by_tape(keras.optimizers.AdamW, options, steps=6)
        compression.average(inner)
        with tempfile.TemporaryDirectory() as folder:
            save_state(f"{folder}/state", compression.state_dict())
            state = load_state(f"{folder}/state")
        weights, own = model.get_weights(), [np.asarray(v).copy() for v in m.raw(inner.variables)]
        again, other = m.make_model(seed=2), keras.optimizers.AdamW(0.003)
        other.build(again.trainable_variables)
        again.set_weights(weights)
        for variable, value in zip(m.raw(other.variables), own, strict=True):
            variable.assign(value)
        resumed, library = m.compressor("wrapper", again, other, **options)
        resumed.load_state_dict(state)
        runs = (model, inner, compression), (again, other, resumed)
        for one in [m.stepper(*run, library, graph=False) for run in runs]:
            for step in range(6, 12):
                one(step)
        m.assert_equal(m.values(again), m.values(model))


@case(way=("model saved first", "compressor saved first", "saved by hand"))
def a_loaded_model_goes_on_bit_for_bit_while_entries_are_selected(way):
    folder = m.shared_folder()
    compression = dgc.Compression.dgc(error_feedback="classic", **{**m.SPARSE, "sparsity": 0.9})
    model = m.compiled(keras.optimizers.Adam(0.003), compression=compression, run_eagerly=False)
    keep = [] if way == "saved by hand" else [dgck.callbacks.CompressionCheckpoint(folder / "state")]
    save = [keras.callbacks.ModelCheckpoint(folder / "model.keras")] if keep and hvd.rank() == 0 else []
    m.fit(model, 4, callbacks=[*save, *keep] if way == "model saved first" else [*keep, *save])
    if not keep:
        compression.average(model.optimizer)
        m.save(model, folder / "model.keras")
    m.barrier()
    loaded = keras.models.load_model(folder / "model.keras")
    if not keep:
        loaded.optimizer.compression.load_state_dict(compression.state_dict())
    m.fit(model, 4, first=4)
    m.fit(loaded, 4, first=4, callbacks=keep)
    m.assert_equal(m.values(loaded), m.values(model))


@case
def u_is_the_moment_of_adam_whatever_is_assigned_to_beta_1():
    """Also where beta_1 is 0 for some steps: Adam's moment is the last gradient then."""
    for betas in ([0.9] * 3 + [0.0] * 3 + [0.9] * 3, [0.9] * 2 + [0.5] * 3 + [0.95] * 4):
        variable, inner = tf.Variable(tf.zeros([40, 30])), keras.optimizers.Adam(0.01)
        options = {**m.SPARSE, "sparsity": 0.5, "momentum_masking": False}
        compression = dgc.Compression.dgc(optimizer=inner, **options)
        moment = np.zeros([40, 30])
        for step, beta in enumerate(betas):
            gradient = np.random.default_rng([step, hvd.rank()]).standard_normal([40, 30]).astype("f")
            if inner.get_config()["beta_1"] != beta:
                inner.beta_1 = beta
            (mean,) = m.reduced(lambda: tf.reduce_sum(variable * gradient), [variable], compression)  # noqa: B023
            inner.apply_gradients([(mean, variable)])
            moment = beta * moment + (1 - beta) * gradient
            (entry,) = compression.state_dict(own=True)["parameters"].values()
            wanted = moment.ravel() / bias_correction(beta, step + 1)
            np.testing.assert_allclose(entry["u"], wanted, rtol=1e-4, atol=1e-6, err_msg=f"{betas} {step}")


@case
def a_loaded_model_goes_on_bit_for_bit_before_the_selection():
    for name, make in KIN.items():
        compression = dgc.Compression.dgc(rampup_begin_step=50, error_feedback="classic")
        model = m.compiled(make(0.003), compression=compression, run_eagerly=True)
        m.fit(model, 2)
        loaded = m.reloaded(model)
        loaded.run_eagerly = True
        for each in (model, loaded):
            m.fit(each, 3, first=2)
        m.assert_equal(m.values(loaded), m.values(model), name)


@case
def results_are_never_taken_for_moments():
    """Where entries are selected, Adam's slots hold the last results: no later run may go on from them."""
    model, inner, compression = by_fit(keras.optimizers.Adam, m.SPARSE, steps=4)
    loaded = m.reloaded(model)
    compression.close()
    for optimizer in (inner, loaded.optimizer.inner_optimizer):
        assert not any(np.asarray(slot).any() for slot in optimizer._momentums)
        assert all(np.asarray(slot).any() for slot in optimizer._velocities)


@case
def what_it_does_not_take():
    """momentum=0 and clipping in the optimizer leave the moment where it is."""
    for make, options in (
        (keras.optimizers.Adam, {"momentum": 0.0}),
        (lambda rate: keras.optimizers.Adam(rate, global_clipnorm=1.0), {}),
        (keras.optimizers.RMSprop, {}),
    ):
        _, inner, compression = by_tape(make, {**m.SPARSE, **options}, steps=2)
        assert not any(compression.engine.adoption.hyper.momentum)
        assert getattr(inner, "beta_1", 0.9) == 0.9


@case
def few_entries_before_an_adaptive_optimizer_are_told_with_the_remedy():
    for make, options, told in (
        (keras.optimizers.AdamW, {}, 1),
        (keras.optimizers.AdamW, {"steps": 1200}, 0),
        (keras.optimizers.SGD, {}, 0),
    ):
        with m.warned("it learns less") as texts:
            _, _, compression = by_tape(make, options, graph=False, steps=1)
        assert len(texts) == (told if hvd.rank() == 0 else 0), (make, options)
        if "steps" in options:
            assert compression.config.sparsity == (1 - 0.15, 1 - 0.05)
