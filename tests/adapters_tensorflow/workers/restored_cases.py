"""Optimizers that were saved by one process, by several or by a dense run, in the hands of another kind of job."""

import tempfile
import warnings

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import SkipCase, case

import dgc.tensorflow as dgc

keras = m.keras
STEPS, MORE = 12, 6


Folder = tempfile.TemporaryDirectory


def sgd(**options):
    return keras.optimizers.SGD(m.schedule(), **{"momentum": 0.9, **options})


def dense(**options):
    return m.compiled(sgd(**options), wrapped=False)


def distributed(process_set=None, **options):
    return m.compiled(sgd(**options), compression=dgc.Compression.dgc(**m.SPARSITY_0), process_set=process_set)


def fit(model, steps=STEPS, first=0, eager=True):
    """The same data on all ranks: their mean is what a run without Horovod sees."""
    model.run_eagerly = eager
    m.fit(model, steps, first, rank=0)
    return model


def load_silently(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return keras.models.load_model(path)


def assert_no_trace(optimizer, model, wanted=None):
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    slots = list(getattr(optimizer, "momentums", ()))
    if hasattr(optimizer, "get_slot_names"):
        variables = m.raw(model.trainable_variables)
        slots = [optimizer.get_slot(v, n) for n in optimizer.get_slot_names() for v in variables]
    assert wanted is None or bool(slots) == wanted, slots
    assert not any(np.asarray(s).any() for s in slots)


def assert_goes_on_as(reference, model, eager=True):
    wanted = m.values(fit(reference, MORE, STEPS))
    fit(model, MORE, STEPS, eager)
    m.assert_close(m.values(model), wanted, 1e-5)
    assert int(model.optimizer.iterations) == STEPS + MORE


# -- slots ---------------------------------------------------------------------------------------------------------


@case
def no_update_is_left_in_the_slots_of_a_saved_model():
    for wrapped in (True, False) if m.LEGACY else (True,):
        given = dgc.Compression.dgc(**m.SPARSITY_0) if wrapped else dict(m.SPARSITY_0)
        model = m.compile_model(given, wrapper=wrapped, **({} if wrapped else {"groups": 1}))
        fit(model)
        assert_no_trace(model.optimizer, model, m.LEGACY)
        if wrapped:
            loaded = m.reloaded(model)
            for _ in range(40):
                loaded.optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in loaded.trainable_variables])
            m.assert_equal(m.values(loaded), m.values(model))


def step_behind_a_tape(model, optimizer, graph=True):
    compression = dgc.Compression.dgc(optimizer=optimizer, **m.SPARSITY_0)
    return m.stepper(model, optimizer, compression, graph=graph)


@case
def no_update_is_left_in_slots_behind_a_tape():
    optimizer, model = sgd(), m.make_model()
    step = step_behind_a_tape(model, optimizer)
    before = m.values(model)
    for i in range(3):
        step(i)
    assert all((a != b).any() for a, b in zip(before, m.values(model), strict=True))
    assert_no_trace(optimizer, model)


# -- both layouts --------------------------------------------------------------------------------------------------


@case
def a_model_of_one_process_goes_on_on_several():
    for options in [{}] if m.LEGACY else [{}, {"use_ema": True}]:
        model = fit(distributed(m.alone(), **options), eager=False)
        model.optimizer._dgc_reducer.process_set = None  # what a job of one process would save
        assert_goes_on_as(fit(dense(**options)), m.reloaded(model, load_silently), eager=False)


@case
def a_dense_wrapper_goes_on_with_its_momentum_and_its_op():
    """The momentum has the shapes of the added gradients that Keras 3 keeps."""
    accumulating = {} if m.LEGACY else {"gradient_accumulation_steps": 2}
    for op in (None, hvd.Sum):
        model = fit(m.compiled(sgd(**accumulating), op=op))
        loaded = fit(m.reloaded(model), MORE, STEPS)
        reference = fit(model if op else fit(dense(**accumulating)), MORE, STEPS)
        m.assert_close(m.values(loaded), m.values(reference), 1e-5)


def restore_dense(model, optimizer):
    """Load a dense run's checkpoint, also into what is built later; returns its model."""
    reference = fit(dense())
    path = tf.train.Checkpoint(model=reference, optimizer=reference.optimizer).save(f"{tempfile.mkdtemp()}/dense")
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path)
    return reference


@case
def a_dense_checkpoint_of_tensorflow_goes_on():
    for built in (True, False):
        model = distributed()
        if built:
            model.optimizer.build(model.trainable_variables)
        assert_goes_on_as(restore_dense(model, model.optimizer), model)


@case
def a_dense_checkpoint_goes_on_behind_a_tape():
    model, optimizer = m.make_model(), sgd()
    step = step_behind_a_tape(model, optimizer, graph=False)
    reference = restore_dense(model, optimizer)
    for i in range(STEPS, STEPS + MORE):
        step(i, rank=0)
    m.assert_close(m.values(model), m.values(fit(reference, MORE, STEPS)), 1e-5)


@case
def our_checkpoint_of_tensorflow_fits_a_dense_run_and_ours():
    with Folder() as folder:
        model = fit(distributed())
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(f"{folder}/ours")
        for other in (dense(), distributed()):
            tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
            assert int(other.optimizer.iterations) == STEPS
            fit(other, 1, STEPS)
            assert int(other.optimizer.iterations) == STEPS + 1


OPTIMIZERS = {
    "SGD": lambda: sgd(),
    "Adam": lambda: keras.optimizers.Adam(m.schedule()),
    "LossScaleOptimizer": lambda: keras.mixed_precision.LossScaleOptimizer(sgd()),
}


@case(optimizer=OPTIMIZERS)
def an_h5_file_keeps_the_number_of_iterations(optimizer):
    if m.LEGACY and optimizer == "LossScaleOptimizer":
        raise SkipCase("tf_keras loses the state of its LossScaleOptimizer in .h5, and does not find ours inside")
    model = m.compiled(OPTIMIZERS[optimizer](), compression=dgc.Compression.dgc(**m.SPARSE), run_eagerly=True)
    m.fit(model, 3)
    with Folder() as folder:
        model.save(f"{folder}/model.h5")
        loaded = keras.models.load_model(f"{folder}/model.h5")
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 3


@case
def what_is_loaded_in_mid_training_counts_after_a_reset():
    model = fit(distributed(), 3)
    reference = restore_dense(model, model.optimizer)
    model.optimizer.compression.reset()
    assert_goes_on_as(reference, model)
