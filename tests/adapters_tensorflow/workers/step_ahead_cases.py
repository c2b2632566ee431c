"""Step-ahead error feedback in Keras 3, on real ranks: the optimizer steps on its rank's gradient, updates travel."""

import contextlib

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras
AHEAD = {"error_feedback": "step-ahead", "min_numel": 64}
EXACT = {**AHEAD, "sparsity": 0.0, "values": "float32", "small": "float32"}
SPARSE = {**AHEAD, "sparsity": 0.95}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),
    "nadam": lambda: keras.optimizers.Nadam(1e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
}
EAGER = {"graph": False, "eager": True}


def made(kind="sgd", options=None, model=None, eager=True, **arguments):
    compression = dgc.Compression.dgc(**(SPARSE if options is None else options))
    inner = OPTIMIZERS[kind]() if isinstance(kind, str) else kind
    optimizer = dgck.DistributedOptimizer(inner, compression=compression, **arguments)
    model = model or m.make_model()
    model.compile(optimizer=optimizer, loss=m.loss_function, run_eagerly=eager)
    return model


def shared(model):
    return model.optimizer.compression.engine.ahead.shared


def assert_shared(model):
    """The shared values are the same on all ranks, and each rank's variables are theta + a."""
    ahead = model.optimizer.compression.engine.ahead
    m.assert_replicas(ahead.shared)
    assert not ahead.is_edited([v.reshape(-1) for v in m.values(model)])


def assert_average(model):
    model.optimizer.compression.average()
    m.assert_replicas(m.values(model))
    assert_shared(model)


@case(eager=EAGER)
def an_exact_exchange_equals_dense_training(eager):
    found = made("sgd", EXACT, eager=EAGER[eager])
    m.fit(found, 12, callbacks=[m.ROOT(0)])
    dense = m.fitted(OPTIMIZERS["sgd"](), steps=12)
    m.assert_close(m.values(found), m.values(dense), 1e-5)
    m.assert_replicas(m.values(found))


@case(kind=OPTIMIZERS, eager=EAGER)
def shared_values_are_the_same_on_all_ranks_with_every_optimizer(kind, eager):
    model = made(kind, eager=EAGER[eager])
    m.fit(model, 8)
    assert_shared(model)
    assert m.replicas_differ(m.values(model))
    assert model.optimizer.compression.stats.last.ratio > 2
    assert_average(model)
    m.fit(model, 4, callbacks=[m.ROOT(0)])
    assert_shared(model)
    m.assert_replicas(m.values(model))  # the callback averages at the end


@case
def the_last_of_the_steps_averages():
    model = made("adamw", {"error_feedback": "step-ahead", "steps": 6}, m.make_model(width=200))
    m.fit(model, 5)
    assert m.replicas_differ(m.values(model))
    m.fit(model, 1)
    m.assert_replicas(m.values(model))
    assert model.optimizer.compression.describe()["error_feedback"] == "step-ahead"
    with m.warned("steps") as texts:
        m.fit(model, 1)
    assert bool(texts) == (hvd.rank() == 0)


@case
def adaptive_optimizers_step_ahead_unless_something_needs_classic():
    def ahead(inner, **options):
        model = m.compiled(inner, compression=dgc.Compression.dgc(**options), run_eagerly=True)
        m.fit(model, 2)
        model.optimizer.compression.average()
        return model.optimizer.compression.config.steps_ahead

    adam = keras.optimizers.Adam
    assert all(ahead(adam(0.01), **options) for options in ({}, {"steps": 6}, {"sparsity": 0.9}))
    assert ahead(keras.optimizers.Lion(1e-3))
    assert ahead(keras.optimizers.LossScaleOptimizer(adam(0.01)))
    classic = {"error_feedback": "classic"}, {"sparsity": 0.0}, {"momentum": 0.0}, {"op": "sum"}
    assert not any(ahead(adam(0.01), **options) for options in classic)
    assert not ahead(adam(0.01, use_ema=True))
    assert not ahead(adam(0.01, gradient_accumulation_steps=2))
    assert not any(ahead(inner) for inner in (keras.optimizers.SGD(0.05), keras.optimizers.Ftrl(0.01)))


@case(ranks=("all", "one"))
def changed_weights_are_taken_over(ranks):
    """As in PyTorch: all ranks go on from the mean."""
    model = made()
    m.fit(model, 3)
    other = m.values(m.make_model(seed=5))
    before = m.values(model)
    mean = m.mean_of_ranks(before)
    if ranks == "all" or hvd.rank() == 1:
        model.set_weights(other)
    wanted = other if ranks == "all" else None
    if wanted is None:
        first = hvd.broadcast_object(before, 0, name="first")
        wanted = [(a + b) / 2 for a, b in zip(first, other, strict=True)] if hvd.size() == 2 else mean
    model.optimizer.learning_rate = 1e-9  # so the step itself moves next to nothing
    model.optimizer.inner_optimizer.momentum = 0.0
    with m.warned("changed outside") as texts:
        m.fit(model, 1, first=3)
    assert bool(texts) == (ranks == "one" and hvd.rank() == 0), texts
    m.assert_close(m.values(model), wanted, 1e-4)
    m.assert_replicas(m.values(model))
    assert_shared(model)


@case(eager=EAGER)
def a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(eager):
    model = made(eager=EAGER[eager])
    m.fit(model, 2)
    x, y = m.batch(2)
    if hvd.rank() == 1:
        x[0, 0] = np.nan
    m.assert_raises(lambda: model.fit(x, y, batch_size=8, verbose=0), "no rank has taken it", "rank 1")
    assert_shared(model)
    assert all(np.isfinite(v).all() for v in m.values(model))


@case
def ranks_that_were_never_broadcast_are_an_error():
    model = made(model=m.make_model(1 + hvd.rank()))
    m.assert_raises(lambda: m.fit(model, 3), "do not train the same model", "BroadcastGlobalVariablesCallback")


@case(eager=EAGER, seeds=("same", "own"))
def a_model_that_is_built_in_fit(eager, seeds):
    """Keras broadcasts it after its first step, which counts as one of the steps."""
    keras.utils.set_random_seed(1 + hvd.rank() * (seeds == "own"))
    model = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(3)])
    model = made("adamw", {**AHEAD, "steps": 5}, model, EAGER[eager])
    m.fit(model, 4, callbacks=[m.ROOT(0)])
    assert_shared(model)
    m.fit(model, 1, callbacks=[])  # without the callback, which averages at the end of every fit()
    m.assert_replicas(m.values(model))


@case
def an_average_keeps_weights_that_were_set_before_it():
    model = made()
    m.fit(model, 3)
    other = m.values(m.make_model(seed=5))
    model.set_weights(other)
    assert_average(model)
    m.assert_close(m.values(model), other, 1e-6)


@case
def a_second_fit_averages_the_momentum_as_well():
    model = made(options=EXACT)
    m.fit(model, 4, callbacks=[m.ROOT(0)])
    m.fit(model, 4, first=4, callbacks=[m.ROOT(0)])
    dense = made(options=EXACT)
    m.fit(dense, 8, callbacks=[m.ROOT(0)])
    m.assert_close(m.values(model), m.values(dense), 1e-5)


@case
def a_restored_compressor_leaves_the_learning_rate_alone():
    model = made("adamw")
    m.fit(model, 3)
    model.optimizer.compression.average(model.optimizer)
    state = model.optimizer.compression.state_dict()
    model.optimizer.learning_rate = 1e-5
    model.optimizer.compression.load_state_dict(state)
    assert float(model.optimizer.learning_rate) == np.float32(1e-5)


@case
def a_second_fit_with_a_new_callback_loses_nothing():
    model = made()
    m.fit(model, 4)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.extend(m.values(self.model))

    wanted = m.mean_of_ranks(m.values(model))
    m.fit(model, 4, callbacks=[m.ROOT(0), Watch()])
    m.assert_close(seen, wanted, 1e-5)
    assert_average(model)


@case(broadcast=(True, False), freeze=(True, False))
def compiling_a_new_optimizer_loses_nothing(broadcast, freeze):
    """As for fine-tuning: the former optimizer's unsent updates of all ranks count."""
    model = made("adamw", eager=False)
    m.fit(model, 8)
    mean = m.mean_of_ranks(model.get_weights())
    if freeze:
        model.layers[0].trainable = False
    model = made("adamw", {**SPARSE, "sparsity": 0.9}, model=model, eager=False)
    model.optimizer.learning_rate = 0.0
    m.fit(model, 2, 8, callbacks=[m.ROOT(0)] if broadcast else [])
    m.assert_close(model.get_weights(), mean, 1e-5)
    m.assert_replicas(model.get_weights())
    model.optimizer.learning_rate = 1e-2
    m.fit(model, 4, 10)
    assert_average(model)


@case
def one_rank_goes_on_from_a_saved_model_and_all_compile_a_new_optimizer():
    """The callback broadcasts. Only the other rank has the former optimizer, so nobody averages it."""
    model = made("adamw")
    m.fit(model, 4, callbacks=[m.ROOT(0)])
    model.optimizer.compression.average(model.optimizer)
    if hvd.rank() == 0:
        model = m.reloaded(model, keras.models.load_model)
    saved = model.get_weights()
    model = made("adamw", model=model)
    model.optimizer.learning_rate = 0.0
    m.fit(model, 2, 4, callbacks=[m.ROOT(0)])
    m.assert_close(model.get_weights(), saved, 1e-6)
    assert_average(model)


def assert_resumed(found, wanted):
    m.assert_equal(m.values(found), m.values(wanted))
    assert_shared(found)
    assert_average(found)


@case(kind=("sgd", "adamw"), first=("model", "compressor"))
def a_compression_checkpoint_resumes_bit_for_bit(kind, first):
    folder = m.shared_folder()
    keep, other = (dgck.callbacks.CompressionCheckpoint(folder / name) for name in ("dgc", "other"))
    save = [keras.callbacks.ModelCheckpoint(folder / "model.keras")] if hvd.rank() == 0 else []
    model = made(kind, eager=False)
    m.fit(model, 4, callbacks=[*save, keep] if first == "model" else [keep, *save])
    m.barrier()
    again = keras.models.load_model(folder / "model.keras")
    m.fit(model, 4, first=4, callbacks=[other])  # it averages at the end, as the other one does
    m.fit(again, 4, first=4, callbacks=[keep])
    assert_resumed(again, model)


@case
def one_callback_serves_a_second_model():
    keep = dgck.callbacks.CompressionCheckpoint(m.shared_folder() / "dgc", restore=False)
    for _ in range(2):
        model = made("adamw", eager=False)
        m.fit(model, 4, callbacks=[keep])
        m.assert_replicas(m.values(model))


@case(first=("backup", "compressor"), execution=(1, 3))
def a_backup_resumes_bit_for_bit(first, execution):
    """Also if Keras runs several steps at once, whose number does not divide an epoch's."""
    folder = m.shared_folder()

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                raise InterruptedError

    def trained(name, *more):
        model = made("adamw", eager=False)
        model.steps_per_execution = execution
        backup = keras.callbacks.BackupAndRestore(folder / f"{name}{hvd.rank()}")
        callbacks = [backup, dgck.callbacks.CompressionCheckpoint(folder / name)]
        with contextlib.suppress(InterruptedError):
            m.fit(model, 4, epochs=2, callbacks=[*(callbacks if first == "backup" else callbacks[::-1]), *more])
        return model

    whole = trained("whole")
    trained("part", Interrupt())
    assert_resumed(trained("part"), whole)


@case
def a_state_of_classic_error_feedback_is_refused():
    classic, model = made(options={"sparsity": 0.95, "min_numel": 64}), made()
    for each in (classic, model):
        m.fit(each, 2)
    classic.optimizer.compression.average(classic.optimizer)
    state = classic.optimizer.compression.state_dict()
    m.assert_raises(lambda: model.optimizer.compression.load_state_dict(state))


@case
def a_reset_begins_again_with_equal_ranks():
    model = made("adamw")
    m.fit(model, 4)
    model.optimizer.compression.reset()
    m.assert_replicas(m.values(model))
    m.fit(model, 4)
    assert_average(model)


@case
def accumulated_passes_equal_dense_training():
    found = []
    compression = dgc.Compression.dgc(**EXACT)
    for given in (compression, None):
        model = m.compile_model(given, learning_rate=0.05, **m.TWO_PASSES)
        m.fit(model, 8)
        found.append(m.values(model))
    assert compression.stats.steps == 4
    m.assert_replicas(found[0])
    m.assert_close(*found, 1e-5)


@case
def several_steps_in_one_call_change_nothing():
    found = []
    for steps in (1, 4):
        model = made("adamw", eager=False)
        model.compile(optimizer=model.optimizer, loss=m.loss_function, steps_per_execution=steps)
        m.fit(model, 8)
        found.append(m.values(model))
    m.assert_equal(*found)


@case
def weight_decay_is_not_lengthened_with_the_updates():
    """With a gradient of 0, RMSprop's update is its weight decay alone."""
    inner, model = keras.optimizers.RMSprop(1e-2, weight_decay=0.5), m.make_model()
    inner.exclude_from_weight_decay(var_names=["bias"])
    optimizer = dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**EXACT))
    variables, generator = model.trainable_variables, np.random.default_rng(hvd.rank())
    for _ in range(3):
        optimizer.apply([tf.constant(generator.standard_normal(v.shape), tf.float32) for v in variables], variables)
    assert max(optimizer.compression.engine.ahead.noise.scales()) > 1.1
    before = m.values(model)
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    m.assert_close(m.values(model), [v * (1 - 0.005 * (v.ndim > 1)) for v in before], 1e-6)


@case
def an_embedding_and_a_frozen_layer():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(50, 16), keras.layers.LSTM(16), keras.layers.Dense(5)]
    model = keras.Sequential(layers)
    model.build((None, 7))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dgck.DistributedOptimizer(OPTIMIZERS["adamw"](), compression=dgc.Compression.dgc(**SPARSE)), loss)
    generator = np.random.default_rng(hvd.rank())
    x, y = generator.integers(0, 50, (64, 7)), generator.integers(0, 5, (64,))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[m.ROOT(0)])
    assert_shared(model)
    layers[0].trainable = False
    model.compile(model.optimizer, loss)
    model.optimizer.compression.average()
    before = layers[0].get_weights()[0]
    model.fit(x, y, batch_size=8, verbose=0)
    model.optimizer.compression.average()
    np.testing.assert_allclose(layers[0].get_weights()[0], before, rtol=0, atol=1e-7)
    m.assert_replicas([np.asarray(v) for v in m.raw(model.variables)])


@contextlib.contextmanager
def mixed_float16():
    policy = keras.config.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)


@case(eager=EAGER, passes=(1, 2))
def an_overflow_on_one_rank_is_skipped_on_all(eager, passes):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
    with mixed_float16():
        model = made(keras.optimizers.AdamW(schedule), eager=EAGER[eager], backward_passes_per_step=passes)
        x, y = m.dataset(8)
        if hvd.rank() == 1:
            x[4 * 8], y[4 * 8] = 1e6, 1e6
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[m.ROOT(0)])
    optimizer = model.optimizer
    state = [optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations, optimizer.learning_rate]
    m.assert_replicas([np.asarray(v) for v in state])
    assert float(np.asarray(optimizer.dynamic_scale)) == 2.0**14
    assert int(np.asarray(optimizer.iterations)) == 7
    assert all(np.isfinite(v).all() for v in m.values(model))
    assert model.optimizer.compression.stats.steps == 8 // passes
    assert_shared(model)
    assert_average(model)


@case(eager=EAGER, steps=(0, 2))
def an_error_of_one_rank_under_mixed_precision_is_an_error_of_all(eager, steps):
    with mixed_float16():
        model = made("adamw", eager=EAGER[eager])
        if steps:
            m.fit(model, steps, callbacks=[m.ROOT(0)])
        if hvd.rank() == 1:
            model.layers[0].kernel.constraint = keras.constraints.NonNeg()
            model.make_train_function(force=True)
        m.assert_raises(lambda: m.fit(model, 1), "a variable has a constraint")


@case
def weights_in_bfloat16():
    model = made("adamw", model=m.make_model(dtype="bfloat16"))
    m.fit(model, 6, callbacks=[m.ROOT(0)])
    before = m.values(model)
    model.optimizer.compression.load_state_dict(model.optimizer.compression.state_dict())
    m.assert_equal(before, m.values(model))
    m.assert_replicas(shared(model))
    assert not model.optimizer.compression.engine.exchange.edited
    model.optimizer.compression.average()
    m.assert_replicas([v.astype(np.float32) for v in m.values(model)])


@case
def a_learning_rate_that_differs_is_an_error_that_names_it():
    model = made()
    m.fit(model, 2)
    model.optimizer.learning_rate = 0.1 / (1 + hvd.rank())
    m.assert_raises(lambda: m.fit(model, 1), "'learning_rate' is [0.1] on rank 0 and [0.05] on rank 1")
    assert_shared(model)


@case(mixed=(False, True))
def a_rank_with_fewer_batches_is_an_error_of_all(mixed):
    with mixed_float16() if mixed else contextlib.nullcontext():
        model = made("adamw")
        m.assert_raises(lambda: m.fit(model, 4 - 2 * hvd.rank(), callbacks=[m.ROOT(0)]), "rank 1 has ended fit()")


@case(mixed=(False, True))
def an_average_on_one_rank_alone_is_an_error_on_all(mixed):
    with mixed_float16() if mixed else contextlib.nullcontext():
        model = made("adamw")
        m.fit(model, 2)
        average, step = model.optimizer.compression.average, lambda: m.fit(model, 1)
        m.assert_raises(step if hvd.rank() else average, "rank 0 failed in step 2: it calls average()")


@case
def an_error_of_one_rank_is_an_error_on_all():
    model = made()
    m.fit(model, 2)
    engine = model.optimizer.compression.engine
    if hvd.rank():
        engine.ahead.is_edited = lambda values: 1 / 0
    m.assert_raises(lambda: m.fit(model, 1), "ZeroDivisionError")


@case
def options_that_do_not_fit_are_refused():
    m.assert_raises(lambda: dgc.Compression.dgc(late=True, **SPARSE), "late=True")
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    m.assert_raises(
        lambda: dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**SPARSE)), "backward_passes_per_step"
    )
    averaging = keras.optimizers.AdamW(1e-3, use_ema=True)
    m.assert_raises(lambda: dgck.DistributedOptimizer(averaging, compression=dgc.Compression.dgc(**SPARSE)), "use_ema=")
    constrained = keras.Sequential([keras.layers.Dense(32, kernel_constraint="non_neg"), keras.layers.Dense(3)])
    m.assert_raises(lambda: m.fit(made(model=constrained), 1), "constraint")
    model = made()
    m.fit(model, 2)
    m.assert_raises(lambda: dgck.join(model.optimizer.compression), "error_feedback='classic'")


@case
def one_rank_alone_trains_plainly():
    model = made("adamw", SPARSE, process_set=m.alone())
    m.fit(model, 3)
    plain = m.fitted(OPTIMIZERS["adamw"](), steps=3, wrapped=False)
    m.assert_equal(m.values(model), m.values(plain))
    model.optimizer.compression.average()
