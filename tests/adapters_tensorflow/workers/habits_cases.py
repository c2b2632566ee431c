"""What scripts for plain Keras and dense Horovod do with their optimizers, on real ranks, in both Kerases."""

import warnings

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import SkipCase, case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras
# Low enough to act in every step.
CLIPPING = ({"clipnorm": 0.05}, {"clipvalue": 0.002}, {"global_clipnorm": 0.1})
RATES = ([1, 3], [0.05, 0.01, 0.08])
STEPS = 6
LEFT = "its momentum stays in it"


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay(*RATES)


def compiled(inner, compression=None, *, wrapped=True, graph=False):
    """Eager unless ``graph``: so short a training takes less time than building its graph."""
    return m.compiled(inner, wrapped=wrapped, compression=compression, run_eagerly=not graph)


def fitted(inner, compression=None, *, steps=STEPS, rank=None, wrapped=True, graph=False):
    model = compiled(inner, compression, wrapped=wrapped, graph=graph)
    m.fit(model, steps, rank=rank)
    return model


def tape_loop(inner, library, compression, steps=10, model=None):
    """A custom loop, in a graph where it compresses; ``library`` wraps the tape."""
    model = model or m.make_model()
    one = m.stepper(model, inner, compression, library, graph=compression is not hvd.Compression.none)
    for step in range(steps):
        one(step)
    return m.values(model)


# -- clipping in the optimizer ---------------------------------------------------------------------------------------


@case
def clipping_in_the_optimizer_equals_dense():
    plain = m.values(fitted(keras.optimizers.SGD(schedule(), momentum=0.9)))
    for clip, nesterov, graph in zip(CLIPPING, (False, True, False), (True, False, False), strict=True):
        options = {"momentum": 0.9, "nesterov": nesterov, **clip}
        dense = m.values(fitted(keras.optimizers.SGD(schedule(), **options)))
        assert any(abs(a - b).max() > 1e-2 for a, b in zip(dense, plain, strict=True)), "nothing was clipped"
        compression = dgc.Compression.dgc(**m.SPARSITY_0)
        model = fitted(keras.optimizers.SGD(schedule(), **options), compression, graph=graph)
        m.assert_close(m.values(model), dense, 1e-5)
        assert compression.stats.steps == STEPS


@case
def clipping_behind_a_tape_equals_dense():
    def optimizer():
        return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.05)

    dense = tape_loop(optimizer(), hvd, hvd.Compression.none)
    inner = optimizer()
    compression = dgc.Compression.dgc(optimizer=inner, **m.SPARSITY_0)
    m.assert_close(tape_loop(inner, dgc, compression), dense, 1e-5)
    inner, model = optimizer(), m.make_model()
    compression = dgc.Compression.dgc(m.raw(model.trainable_variables), optimizer=inner, **m.SPARSITY_0)
    m.assert_close(tape_loop(inner, hvd, compression, model=model), dense, 1e-5)


@case
def clipping_keeps_replicas_alike_and_is_said_once_on_rank_0():
    for clip in CLIPPING:
        with m.warned(LEFT) as said:
            compression = dgc.Compression.dgc(**m.SPARSE)
            model = fitted(keras.optimizers.SGD(0.05, momentum=0.9, **clip), compression)
        m.assert_replicas(m.values(model))
        assert compression.stats.total.density < 0.012
        assert len(said) == (hvd.rank() == 0), said
        assert all(next(iter(clip)) in text for text in said)


@case
def clipping_without_momentum_in_the_optimizer_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compiled(keras.optimizers.SGD(0.05, clipnorm=0.05), dgc.Compression.dgc(**m.SPARSE))
        compiled(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.05), dgc.Compression.dgc(momentum=0))
    m.fit(model, 3)


def normed(gradients):
    return [g / (tf.norm(g) + 1e-9) for g in gradients]


def subclass(name, change):
    """Keras' SGD with one method of its own."""
    return type("Own", (keras.optimizers.SGD,), {name: change(getattr(keras.optimizers.SGD, name))})


def first_argument(method):
    return lambda self, gradients, *more, **options: method(self, normed(gradients), *more, **options)


def pairs_of(method):
    def changed(self, pairs, *more, **options):
        gradients, variables = zip(*pairs, strict=True)
        return method(self, zip(normed(gradients), variables, strict=True), *more, **options)

    return changed


def compiled_first_argument(method):
    return tf.function(lambda self, gradient, *more: method(self, normed([gradient])[0], *more), autograph=False)


class Normalised(keras.optimizers.SGD):
    """Gives every gradient the norm 1 before the update, much as LARS does."""

    def update_step(self, gradient, variable, *rate):
        super().update_step(normed([gradient])[0], variable, *rate)


def on_the_instance(**options):
    optimizer = keras.optimizers.SGD(0.02, **options)
    plain = optimizer.update_step
    optimizer.update_step = lambda gradient, *more: plain(normed([gradient])[0], *more)
    return optimizer


def made(cls):
    return lambda **options: cls(0.02, **options)


OWN = {
    "update_step()": made(Normalised),
    "an instance's": on_the_instance,
    "clipping": made(subclass("_clip_gradients", first_argument)),
}
if m.LEGACY:
    OWN |= {
        "internal": made(subclass("_internal_apply_gradients", pairs_of)),
        "pairs": made(subclass("apply_gradients", pairs_of)),
    }
else:
    OWN |= {
        "backend's": made(subclass("_backend_update_step", first_argument)),
        "apply": made(subclass("apply", first_argument)),
        "compiled": made(subclass("update_step", compiled_first_argument)),
    }


@case
def whatever_of_the_users_own_changes_gradients_sees_gradients():
    plain = m.values(fitted(keras.optimizers.SGD(0.02, momentum=0.9)))
    for name, make in OWN.items():
        dense = m.values(fitted(make(momentum=0.9)))
        assert any(abs(a - b).max() > 1e-2 for a, b in zip(dense, plain, strict=True)), f"{name}: nothing is changed"
        with m.warned(LEFT) as said:
            graph = name == "update_step()"
            found = m.values(fitted(make(momentum=0.9), dgc.Compression.dgc(**m.SPARSITY_0), graph=graph))
        m.assert_close(found, dense, 1e-5)
        assert len(said) == (hvd.rank() == 0), (name, said)
        assert all("pass momentum= to the compressor" in text and (not graph or name in text) for text in said)


@case
def a_learning_rate_of_0_takes_no_gradient_in():
    def rates(values):
        return keras.optimizers.schedules.PiecewiseConstantDecay([1, 2, 8, 10], values)

    for nesterov in (False, True):
        beginning = [0.0, 0.0, 0.05, 0.05, 0.05]
        dense = m.values(fitted(keras.optimizers.SGD(rates(beginning), momentum=0.9, nesterov=nesterov)))
        inner = keras.optimizers.SGD(rates(beginning), momentum=0.9, nesterov=nesterov)
        m.assert_close(m.values(fitted(inner, dgc.Compression.dgc(**m.SPARSITY_0))), dense, 1e-5)


@case
def nothing_is_lost_at_a_learning_rate_of_0():
    """Velocity and residual wait until the rate is above 0 again."""
    compression = dgc.Compression.dgc(**m.SPARSITY_0)
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    model = compiled(inner, compression)
    m.fit(model, 5)
    before, kept = m.values(model), compression.state_dict()["parameters"]
    inner.learning_rate = 0.0
    m.fit(model, 2)
    for a, b in zip(before, m.values(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert compression.stats.steps == 7
    for name, entry in compression.state_dict()["parameters"].items():
        np.testing.assert_array_equal(entry["u"], kept[name]["u"])
        np.testing.assert_array_equal(entry.get("v"), kept[name].get("v"))
    m.assert_replicas(m.values(model))


@case
def a_momentum_assigned_later_stays_with_an_update_of_the_users_own():
    dense = m.values(fitted(Normalised(0.02, momentum=0.9)))
    inner = Normalised(0.02)
    model = compiled(inner, dgc.Compression.dgc(**m.SPARSITY_0))
    inner.momentum = 0.9
    m.fit(model, STEPS)
    m.assert_close(m.values(model), dense, 1e-5)


@case
def clipping_of_a_velocity_is_refused():
    """One that the compressor has adopted; that of a momentum of its own is in clipping_cases.py."""
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    model = fitted(inner, dgc.Compression.dgc(**m.SPARSE), steps=2)
    inner.clipnorm = 0.5
    m.assert_raises(lambda: m.fit(model, 2), "clipnorm=0.5", "would act on the velocity")


# -- Keras' own gradient accumulation --------------------------------------------------------------------------------

ACCUMULATING = {
    "sgd": lambda **o: keras.optimizers.SGD(schedule(), momentum=0.9, **o),
    "clipped": lambda **o: keras.optimizers.SGD(schedule(), momentum=0.9, clipnorm=0.05, **o),
    "adam": lambda **o: keras.optimizers.Adam(schedule(), **o),
    "overwriting": lambda **o: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, **o
    ),
}


@case("keras3")
def accumulating_optimizers_equal_plain_keras():
    for name, make in ACCUMULATING.items():
        # The same data on all ranks, so that Keras alone is a dense run.
        plain = fitted(make(gradient_accumulation_steps=3), wrapped=False, steps=12, rank=0)
        compression = dgc.Compression.dgc(**m.SPARSITY_0)
        own = make(gradient_accumulation_steps=3)
        model = fitted(own, compression, steps=12, rank=0, graph=name == "overwriting")
        m.assert_close(m.values(model), m.values(plain), 1e-5)
        assert compression.stats.steps == 12
        assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == 4
    m.assert_replicas(m.values(model))
    both = dict(compression=dgc.Compression.dgc(), backward_passes_per_step=2)
    m.assert_raises(lambda: dgck.DistributedOptimizer(make(gradient_accumulation_steps=2), **both), "choose one")


# -- one step, two exchanges -----------------------------------------------------------------------------------------


def two_losses(inner, library, compression, steps=6):
    """A persistent tape whose ``gradient()`` is asked for two losses."""
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    for step in range(steps):
        x, y = map(tf.constant, m.batch(step))
        with tf.GradientTape(persistent=True) as tape:
            first, second = m.loss_function(y, model(x)), tf.reduce_mean(model(x) ** 2)
        tape = library.DistributedGradientTape(tape, compression=compression)
        parts = [tape.gradient(loss, variables) for loss in (first, second)]
        sums = [a + b for a, b in zip(*parts, strict=True)]
        inner.apply_gradients(zip(sums, model.trainable_variables, strict=True))
    return m.values(model)


@case
def two_gradients_of_one_tape_equal_dense_or_are_refused():
    dense = two_losses(keras.optimizers.SGD(0.05, momentum=0.9), hvd, hvd.Compression.none)
    compression = dgc.Compression.dgc(momentum=0, **m.SPARSITY_0)
    m.assert_close(two_losses(keras.optimizers.SGD(0.05, momentum=0.9), dgc, compression), dense, 1e-5)
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    compression = dgc.Compression.dgc(optimizer=inner, **m.SPARSITY_0)
    m.assert_raises(lambda: two_losses(inner, dgc, compression), "gradient() was called twice on one tape")


@case
def gradients_of_our_tape_in_our_optimizer_are_refused():
    inner = keras.optimizers.SGD(0.05)
    optimizer = dgck.DistributedOptimizer(inner, compression=dgc.Compression.dgc(**m.SPARSE))
    compression = dgc.Compression.dgc(momentum=0, **m.SPARSE)
    model = m.make_model()

    for graph in (False, True):
        step = m.stepper(model, optimizer, compression, graph=graph)
        m.assert_raises(lambda: step(0), "were exchanged already")  # noqa: B023


# -- momentum that is changed in mid-training ------------------------------------------------------------------------


def equal_to_dense_when(change, **options):
    """Train 5 steps, let ``change`` do something to the optimizer, train 5 more; compare with a dense run."""
    results = []
    for compression in (None, dgc.Compression.dgc(**m.SPARSITY_0)):
        model = compiled(keras.optimizers.SGD(0.05, **options), compression, graph=compression is not None)
        m.fit(model, 5)
        change(model.optimizer)
        m.fit(model, 5, first=5)
        results.append(m.values(model))
    m.assert_close(results[1], results[0], 1e-5)
    return model


@case
def another_momentum_is_followed():
    def lower(optimizer):
        optimizer.momentum = 0.5

    model = equal_to_dense_when(lower, momentum=0.9)
    assert model.optimizer.compression.adoption.momentum == 0.5
    assert own_config(model.optimizer)["momentum"] == 0.5


@case
def momentum_0_is_followed():
    def drop(optimizer):
        getattr(optimizer, "inner_optimizer", optimizer).momentum = 0

    model = equal_to_dense_when(drop, momentum=0.9)
    assert own_config(model.optimizer)["momentum"] == 0


@case
def momentum_0_and_back_is_followed():
    """Keras 3 keeps its velocity meanwhile, legacy Keras goes on from the last update."""
    found = []
    for options in (None, m.SPARSITY_0):
        model, inner = m.make_model(), keras.optimizers.SGD(0.05, momentum=0.9)
        compression, library = m.compressor("wrapper" if options else "dense", model, inner, **(options or {}))
        step = m.stepper(model, inner, compression, library, graph=False)
        for number in range(9):
            if number in (3, 6):
                inner.momentum = 0.0 if number == 3 else 0.9
            step(number)
        found.append(m.values(model))
    m.assert_close(found[1], found[0], 1e-5)


@case
def nesterov_is_followed():
    def leave(optimizer):
        optimizer.nesterov = False

    equal_to_dense_when(leave, momentum=0.9, nesterov=True)


@case
def a_tape_follows_the_momentum_of_its_optimizer():
    found = []
    for library, options in ((hvd, None), (dgc, m.SPARSITY_0)):
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        compression = hvd.Compression.none if options is None else dgc.Compression.dgc(optimizer=inner, **options)
        model = m.make_model()
        tape_loop(inner, library, compression, steps=5, model=model)
        inner.momentum = 0.0
        found.append(tape_loop(inner, library, compression, steps=5, model=model))
    m.assert_close(found[1], found[0], 1e-5)


# -- what leaves our optimizers, and what comes back ------------------------------------------------------------------


def own_config(optimizer):
    """The user's optimizer's part of a configuration."""
    config = optimizer.get_config()
    return config["inner"] if m.LEGACY else config["inner_optimizer"]["config"]


@case
def a_configuration_holds_the_user_s_own_momentum():
    make = keras.optimizers.SGD
    inner = make(0.05, momentum=0.75, nesterov=True)
    dgc.Compression.dgc(optimizer=inner, **m.SPARSE)
    config = inner.get_config()
    assert (config["momentum"], config["nesterov"]) == (0.75, True)
    assert make.from_config(config).momentum == 0.75
    m.assert_raises(lambda: dgc.Compression.dgc(optimizer=inner), "has taken this optimizer's momentum")
    model = compiled(make(0.05, momentum=0.75, nesterov=True), dgc.Compression.dgc(**m.SPARSE))
    config = own_config(model.optimizer)
    assert (config["momentum"], config["nesterov"]) == (0.75, True)


@case("keras3")
def the_wrapper_shows_and_sets_the_user_s_options():
    inner = keras.optimizers.SGD(0.05, momentum=0.75, nesterov=True, weight_decay=0.01)
    optimizer = compiled(inner, dgc.Compression.dgc(**m.SPARSE)).optimizer
    assert (optimizer.momentum, optimizer.nesterov, optimizer.weight_decay) == (0.75, True, 0.01)
    optimizer.weight_decay, optimizer.momentum = 0.02, 0.5
    assert (optimizer.momentum, inner.weight_decay) == (0.5, 0.02)
    assert not hasattr(compiled(keras.optimizers.Adam(), dgc.Compression.dgc()).optimizer, "momentum")


@case
def weights_that_only_the_root_loads_leave_nothing_of_the_abandoned_run():
    model = compiled(keras.optimizers.SGD(0.05, momentum=0.9), dgc.Compression.dgc(**m.SPARSE))
    start = m.values(model)
    again = dgck.callbacks.BroadcastGlobalVariablesCallback(0)

    def fit(first):
        x, y = m.batch(first)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[again])

    engine = None
    for step in range(4):
        fit(step)
        engine = model.optimizer.compression.engine
        v = engine.residual_norm()
        assert v > 0
    before = {n: e["v"].copy() for n, e in engine.state_dict()["parameters"].items() if "v" in e}
    if hvd.rank() == 0:
        model.set_weights(start)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append((engine.residual_norm(), [v.copy() for v in m.values(model)]))

    x, y = m.batch(9)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[again, Watch()])
    assert before
    assert seen[0][0] == 0.0
    assert all((a == b).all() for a, b in zip(seen[0][1], start, strict=True))
    m.assert_replicas(m.values(model))
    # A fit that goes on keeps what it has.
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[again, Watch()])
    assert seen[1][0] > 0.0


@case
def replicas_are_compared_again_after_a_broadcast():
    if hvd.size() == 1:
        raise SkipCase("one rank has no replicas")
    root = dgck.callbacks.BroadcastGlobalVariablesCallback
    model = compiled(keras.optimizers.SGD(0.05, momentum=0.9), dgc.Compression.dgc(**m.SPARSE))
    m.fit(model, 3, callbacks=[root(0)])
    weight = m.raw(model.trainable_variables)[0]

    class Spoil(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            weight.assign_add(tf.ones_like(weight) * float(hvd.rank()))

    m.assert_raises(lambda: m.fit(model, 2, callbacks=[root(0), Spoil()]), "do not train the same model")


if __name__ == "__main__":
    run_cases()
