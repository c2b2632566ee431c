"""Learning rate, momentum and Nesterov that change in mid-training; and what a configuration says of them."""

import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras


@case
def a_learning_rate_of_0_takes_no_gradient_in():
    def rates(values):
        return keras.optimizers.schedules.PiecewiseConstantDecay([1, 2, 8, 10], values)

    for nesterov in (False, True):
        beginning = [0.0, 0.0, 0.05, 0.05, 0.05]
        dense = m.values(m.fitted(keras.optimizers.SGD(rates(beginning), momentum=0.9, nesterov=nesterov)))
        inner = keras.optimizers.SGD(rates(beginning), momentum=0.9, nesterov=nesterov)
        m.assert_close(m.values(m.fitted(inner, dgc.Compression.dgc(**m.SPARSITY_0))), dense, 1e-5)


@case
def nothing_is_lost_at_a_learning_rate_of_0():
    """Velocity and residual wait until the rate is above 0 again."""
    compression = dgc.Compression.dgc(**m.SPARSITY_0)
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    model = m.eager(inner, compression)
    m.fit(model, 5)
    compression.average(model.optimizer)
    before, kept = m.values(model), compression.state_dict()["parameters"]
    inner.learning_rate = 0.0
    m.fit(model, 2)
    m.assert_equal(before, m.values(model))
    assert compression.stats.steps == 7
    for name, entry in compression.state_dict()["parameters"].items():
        np.testing.assert_array_equal(entry["u"], kept[name]["u"])
        np.testing.assert_array_equal(entry.get("v"), kept[name].get("v"))
    m.assert_replicas(m.values(model))


CHANGES = {
    "another momentum": {"momentum": 0.5},
    "no momentum": {"momentum": 0.0},
    "no nesterov": {"nesterov": False},
}


@case(change=CHANGES)
def a_change_equals_that_of_a_dense_run(change):
    results = []
    for compression in (None, dgc.Compression.dgc(**m.SPARSITY_0)):
        inner = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
        model = m.eager(inner, compression, graph=compression is not None)
        m.fit(model, 5)
        for name, value in CHANGES[change].items():
            # By the wrapper or by what it wraps; in legacy Keras they are one.
            setattr(
                model.optimizer if value else getattr(model.optimizer, "inner_optimizer", model.optimizer), name, value
            )
            assert compression is None or own_config(model.optimizer)[name] == value
        m.fit(model, 5, first=5)
        results.append(m.values(model))
    m.assert_close(results[1], results[0], 1e-5)


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
    model = m.eager(make(0.05, momentum=0.75, nesterov=True), dgc.Compression.dgc(**m.SPARSE))
    config = own_config(model.optimizer)
    assert (config["momentum"], config["nesterov"]) == (0.75, True)


@case("keras3")
def the_wrapper_shows_and_sets_the_user_s_options():
    inner = keras.optimizers.SGD(0.05, momentum=0.75, nesterov=True, weight_decay=0.01)
    optimizer = m.eager(inner, dgc.Compression.dgc(**m.SPARSE)).optimizer
    assert (optimizer.momentum, optimizer.nesterov, optimizer.weight_decay) == (0.75, True, 0.01)
    optimizer.weight_decay, optimizer.momentum = 0.02, 0.5
    assert (optimizer.momentum, inner.weight_decay) == (0.5, 0.02)
    assert not hasattr(m.eager(keras.optimizers.Adam(), dgc.Compression.dgc()).optimizer, "momentum")
    inner = keras.optimizers.AdamW(0.01)
    optimizer = m.eager(inner, dgc.Compression.dgc(momentum=0)).optimizer
    optimizer.beta_1, optimizer.clipnorm, optimizer.my_own = 0.5, 1.0, "a"
    assert (inner.beta_1, inner.clipnorm, optimizer.beta_1) == (0.5, 1.0, 0.5)
    assert optimizer.my_own == "a"
    assert not hasattr(inner, "my_own")


@case("keras3")
def variables_that_the_wrapper_excludes_do_not_decay():
    optimizer = dgck.DistributedOptimizer(
        keras.optimizers.AdamW(0.01, weight_decay=0.5), compression=dgc.Compression.dgc()
    )
    optimizer.exclude_from_weight_decay(var_names=["kept"])
    kept, decayed = (keras.Variable(np.ones(4, "f"), name=name) for name in ("kept", "decayed"))
    optimizer.apply_gradients([(tf.zeros(4), variable) for variable in (kept, decayed)])
    assert (np.asarray(kept.value) == 1.0).all()
    assert (np.asarray(decayed.value) < 1.0).all()
