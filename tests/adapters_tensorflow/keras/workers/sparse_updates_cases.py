"""On real ranks: variables updated by received entries alone are those of the dense way, bit for bit."""

from __future__ import annotations

import warnings

import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

keras = m.keras
STEPS = 15
"""As many as two changes of the learning rate need."""
# The last layer's kernel and all biases are sent dense.
OPTIONS = {"sparsity": 0.99, "bucket_bytes": 20_000}


def sgd(learning_rate=0.05, **options):
    return lambda: keras.optimizers.SGD(learning_rate() if callable(learning_rate) else learning_rate, **options)


def wrapped(make, **hvd_options):
    def build(options):
        return dgck.DistributedOptimizer(make(), compression=dgc.Compression.dgc(**options), **hvd_options)

    return build


def eagerly(model, optimizer, steps, each=None):
    """A loop that takes gradients and applies them, with other learning rates on the way."""
    for step in range(steps):
        if each is not None:
            each(model, optimizer, step)
        x, y = m.batch(step)
        gradients = m.own_gradients(model, x.astype(model.dtype), y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        yield


def in_a_graph(model, optimizer, steps):
    """The same by fit(), in one graph."""
    model.compile(optimizer=optimizer, loss=m.loss_function)
    m.fit(model, steps)
    yield


def both(build, *, train=eagerly, how="sparse", model=m.make_model, options=None, steps=STEPS):
    """Train two models, one with sparse updates and one without; they must be the same after every step."""
    found = []
    for wanted in (True, False):
        made = model()
        optimizer = build({**OPTIONS, **(options or {}), "sparse_updates": wanted})
        found.append([m.values(made) for _ in train(made, optimizer, steps)])
        said = optimizer.compression.describe()["updates"]
        assert said.startswith(how if wanted else "dense: "), said
        m.assert_replicas(found[-1][-1])
        optimizer.compression.close()
    for step, (a, e) in enumerate(zip(*found, strict=True)):
        for tensor, (actual, expected) in enumerate(zip(a, e, strict=True)):
            same = actual.view(np.uint8) == expected.view(np.uint8)
            assert same.all(), f"comparison {step}, tensor {tensor}: {(~same).sum()} of {same.size} bytes differ"
    return found[0]


def rates(model, optimizer, step):
    optimizer.learning_rate = m.rate(step)


@case
def sgd_without_momentum_with_it_and_with_nesterov():
    for options in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}):
        both(wrapped(sgd(**options)), train=lambda *a: eagerly(*a, rates))


@case
def options_of_the_compressor():
    both(wrapped(sgd()), options={"momentum": 0.9, "weight_decay": 0.01})
    both(
        wrapped(sgd()),
        options={"momentum": 0.9, "local_grad_clip_norm": 0.1, "indices": "elias_fano", "values": "float32"},
    )


@case
def fit_across_a_schedule_and_the_ramp_up():
    options = {"sparsity": [0.75, 0.9, 0.99], "rampup_begin_step": 4, "rampup_step": 9}
    both(wrapped(sgd(m.schedule, momentum=0.9, nesterov=True)), train=in_a_graph, options=options)


@case
def everything_sparsified_and_nothing_left_to_the_optimizer():
    counts = []

    def train(model, optimizer, steps):
        yield from in_a_graph(model, optimizer, steps)
        counts.append((int(optimizer.iterations), float(tf.convert_to_tensor(optimizer.learning_rate))))

    both(wrapped(sgd(m.schedule, momentum=0.9)), train=train, options={"min_numel": 1})
    assert counts[0] == counts[1], counts
    assert counts[0][0] == STEPS, counts


@case
def a_momentum_that_is_assigned_on_the_way():
    def each(model, optimizer, step):
        optimizer.momentum = 0.5 if 5 <= step < 10 else 0.9

    both(wrapped(sgd(momentum=0.9)), train=lambda *a: eagerly(*a, each))


@case
def float64():
    both(wrapped(sgd(momentum=0.9)), model=lambda: m.make_model(dtype="float64"), steps=10)


@case
def dgc_momentum():
    def build(options):
        return dgck.DGCMomentum(
            0.05,
            0.9,
            rampup_begin_step=3,
            sparsity=(0.99,),
            use_nesterov=True,
            regularization=dgc.L2Decay(1e-3),
            min_numel=1024,
            sparse_updates=options["sparse_updates"],
        )

    both(build, train=lambda *a: eagerly(*a, rates))
    both(build, train=in_a_graph)


def convolutional():
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Reshape((20, 1)),
        keras.layers.Conv1D(32, 3, padding="same"),
        keras.layers.Reshape((20, 32, 1)),
        keras.layers.Conv2D(16, 3, strides=2, padding="same"),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    model.build((None, 20))
    return model


@case
def kernels_of_more_dimensions():
    both(wrapped(sgd(0.01, momentum=0.9)), model=convolutional, options={"min_numel": 64}, steps=10)


@case
def members_of_which_one_sends_no_entries():
    C = dgc.Compression

    def build(options):
        common = {k: options[k] for k in ("sparse_updates", "bucket_bytes")}
        members = {0: C.onebit(), 3000: C.topk(sparsity=0.99)}
        return dgck.DistributedOptimizer(sgd()(), compression=C.by_size(members, **common))

    both(build, how="dense: the latest step was refused, or results of it came dense", steps=6)


@case
def sparse_gradients_beside_it():
    def embedding():
        keras.utils.set_random_seed(1)
        words = keras.layers.Input((20,))
        features = keras.layers.Flatten()(keras.layers.Embedding(50, 16)(words))
        return keras.Model(words, keras.layers.Dense(3)(keras.layers.Dense(64)(features)))

    def train(model, optimizer, steps):
        for step in range(steps):
            x, y = m.batch(step)
            gradients = m.own_gradients(model, np.abs(x * 10).astype(np.int32), y)
            given = gradients[0]
            poison = np.nan if step == 9 and hvd.rank() == 1 else 1.0
            gradients[0] = tf.IndexedSlices(given.values * poison, given.indices, given.dense_shape)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            yield

    both(wrapped(sgd()), model=embedding, train=train, steps=10)


@case
def what_was_read_before_a_step_stays():
    """In the memory that a scatter would write into, if it did not look who else holds it."""
    model = m.make_model()
    optimizer = wrapped(sgd(momentum=0.9))({**OPTIONS, "min_numel": 1})
    variable = m.raw(model.trainable_variables)[2]
    for _ in eagerly(model, optimizer, 2):
        pass
    before = variable.read_value()
    copy = before.numpy()
    for _ in eagerly(model, optimizer, 2):
        pass
    assert (np.asarray(before) == copy).all()
    assert (variable.numpy() != copy).any()

    @tf.function
    def step(x, y):
        early = tf.identity(variable)
        gradients = m.own_gradients(model, x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return early, tf.identity(variable)

    for number in range(3):
        held = variable.numpy()
        early, late = step(*map(tf.constant, m.batch(number)))
        assert (early.numpy() == held).all()
        assert (late.numpy() == variable.numpy()).all()
        assert (early.numpy() != late.numpy()).any()
    assert optimizer.compression.describe()["updates"] == "sparse"


@case
def a_variable_is_read_without_a_copy_afterwards():
    model = m.make_model()
    optimizer = wrapped(sgd())(OPTIONS)
    for _ in eagerly(model, optimizer, 3):
        pass
    assert optimizer.compression.describe()["updates"] == "sparse"
    for variable in m.raw(model.trainable_variables):
        first, second = variable.read_value(), variable.read_value()
        assert np.asarray(first).ctypes.data == np.asarray(second).ctypes.data, variable.name


@case
def a_refused_step_is_what_it_is_in_the_dense_way():
    def train(model, optimizer, steps):
        for step in range(steps):
            variables = m.raw(model.trainable_variables)
            poison = np.nan if step == 2 and hvd.rank() == 1 else 1.0
            gradients = [tf.ones_like(v) * poison for v in variables]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            yield

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        values = both(wrapped(sgd()), train=train, steps=4)
    assert np.isfinite(values[1][0]).all()
    assert np.isnan(values[2][0]).any()


@case
def a_rate_of_zero_goes_the_dense_way():
    said = []

    def each(model, optimizer, step):
        if step and optimizer.compression.config.sparse_updates:
            said.append(optimizer.compression.describe()["updates"])
        optimizer.learning_rate = 0.0 if step == 1 else 0.05

    both(wrapped(sgd(momentum=0.9)), train=lambda *a: eagerly(*a, each), steps=4)
    assert said == ["sparse", "dense: the learning rate is not a positive number", "sparse"], said


@case
def whatever_looks_at_gradients_goes_the_dense_way():
    class Own(keras.optimizers.SGD):
        pass

    def constrained():
        model = m.make_model()
        first = model.layers[0].kernel
        if m.LEGACY:
            first._constraint = keras.constraints.MaxNorm(1.0)
        else:
            first.constraint = keras.constraints.MaxNorm(1.0)
        return model

    build = [
        (sgd(clipnorm=1.0), {}, "the optimizer has clipnorm=1.0"),
        (sgd(weight_decay=0.01), {}, "the optimizer has weight_decay=0.01"),
        (sgd(use_ema=True), {}, "the optimizer has use_ema"),
        (lambda: Own(0.05), {}, "the optimizer is Own, not Keras' SGD"),
        (lambda: keras.optimizers.Adam(0.05), {}, "the optimizer is Adam, not Keras' SGD"),
        (sgd(), {"backward_passes_per_step": 2}, "gradients of several passes are added up"),
    ]
    if m.LEGACY:
        build.append((lambda: keras.optimizers.legacy.SGD(0.05), {}, "tf_keras.optimizers.legacy.SGD updates"))
    else:
        build.append((sgd(loss_scale_factor=8.0), {}, "the optimizer has loss_scale_factor=8.0"))
        build.append((lambda: keras.optimizers.SGD(lambda: 0.05), {}, "the learning rate is a function"))
    for make, hvd_options, reason in build:
        both(wrapped(make, **hvd_options), how=f"dense: {reason}", steps=4 if hvd_options else 2)
    both(wrapped(sgd()), how="dense: ", model=constrained, steps=2)
    left = {"momentum": 0.0}
    both(wrapped(sgd(momentum=0.9)), how="dense: the optimizer applies momentum itself", options=left, steps=2)


@case
def local_variables_and_replaced_methods_go_the_dense_way():
    def local(model, optimizer, steps):
        optimizer.register_local_var(m.raw(model.trainable_variables)[-1])
        for _ in eagerly(model, optimizer, steps):
            pass
        yield from ()

    optimizer = wrapped(sgd())(OPTIONS)
    list(local(m.make_model(), optimizer, 2))
    assert optimizer.compression.describe()["updates"].startswith("dense: some variables are local")

    seen = []
    optimizer = wrapped(sgd())(OPTIONS)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    update_step = inner.update_step

    def watching(gradient, *rest):
        seen.append(gradient.shape)
        return update_step(gradient, *rest)

    inner.update_step = watching
    for _ in eagerly(m.make_model(), optimizer, 2):
        pass
    assert optimizer.compression.describe()["updates"] == "dense: a method of the optimizer was replaced"
    assert len(seen) == 12, len(seen)


@case
def gradients_that_a_script_gets_are_dense():
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    compression = dgc.Compression.dgc(**OPTIONS, momentum=0)
    gradients = m.tape_step(model, compression)
    assert all(g.shape == v.shape for g, v in zip(gradients, variables, strict=True))
    assert compression.describe()["updates"] == "dense: the reduced gradients are returned to the script"


@case("legacy")
def gradients_aggregated_by_hand_are_dense():

    def train(model, optimizer, steps):
        for step in range(steps):
            pairs = zip(m.own_gradients(model, *m.batch(step)), model.trainable_variables, strict=True)
            pairs = optimizer.aggregate_gradients(pairs)
            assert all(g.shape == v.shape for g, v in pairs)
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
            yield

    both(wrapped(sgd(momentum=0.9)), train=train, how="dense: the reduced gradients are returned", steps=4)


if __name__ == "__main__":
    run_cases()
