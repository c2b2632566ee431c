"""Models, data and short training runs that the TensorFlow worker cases share, all seeded by step and rank."""

import contextlib
import tempfile
import warnings
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()

keras = tf.keras
LEGACY = keras.optimizers.SGD.__module__.startswith("tf_keras")

SPARSITY_0 = {"sparsity": 0.0, "momentum_masking": False, "min_numel": 64}
SPARSE = {"sparsity": 0.99, "min_numel": 64}
TWO_PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}

OPTIMIZERS = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decoupled decay": {"momentum": 0.9, "weight_decay": 0.01},
}

ROOT = dgck.callbacks.BroadcastGlobalVariablesCallback
loss_function = keras.losses.MeanSquaredError()


def make_model(seed=1, width=64, dtype=None):
    keras.utils.set_random_seed(seed)
    # Biases away from 0: a relative bound on a tensor that hardly left 0 would measure rounding only.
    options = {"bias_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=seed)}
    if dtype:
        options["dtype"] = dtype
    layers = [
        keras.layers.Dense(width, activation="tanh", **options),
        keras.layers.Dense(width, activation="tanh", **options),
        keras.layers.Dense(3, **options),
    ]
    model = keras.Sequential(layers)
    model.build((None, 20))
    return model


_alone = []


def alone():
    """A process set in which this rank exchanges with nobody, as in a job of one process."""
    if not _alone or _alone[0].process_set_id is None:  # Horovod has forgotten it since
        _alone[:] = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    return _alone[hvd.rank()]


def batch(step, rank=None, size=8):
    generator = np.random.default_rng([step, hvd.rank() if rank is None else rank])
    return generator.standard_normal((size, 20)).astype("f"), generator.standard_normal((size, 3)).astype("f")


def dataset(steps, rank=None, size=8):
    parts = [batch(s, rank, size) for s in range(steps)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def rate(step):
    """Two changes within 20 steps, up and down."""
    return 0.05 if step < 7 else 0.01 if step < 13 else 0.08


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([6, 12], [0.05, 0.01, 0.08])


def short_schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.05, 0.01, 0.08])


def mean_of_ranks(arrays):
    return [np.asarray(hvd.allreduce(tf.constant(v), name="mean")) for v in arrays]


def raw(variables):
    return [getattr(v, "_value", v) for v in variables]


def values(model):
    return [np.asarray(v).copy() for v in raw(model.trainable_variables)]


def own_gradients(model, x, y):
    """This rank's gradients."""
    with tf.GradientTape() as tape:
        loss = loss_function(y, model(x))
    return tape.gradient(loss, raw(model.trainable_variables))


def reduced(loss, variables, compression, library=dgc, **options):
    """Gradients of ``loss()`` that a distributed tape of ``library`` has reduced."""
    if library is hvd:
        options = {"groups": 1, **options}
    with tf.GradientTape() as tape:
        value = loss()
    given = dgc.Compression.none if compression is None else compression
    return library.DistributedGradientTape(tape, compression=given, **options).gradient(value, variables)


def tape_step(model, compression, step=0, library=dgc, **options):
    """Reduced gradients of the model's loss at one batch."""
    x, y = map(tf.constant, batch(step))
    variables = raw(model.trainable_variables)
    return reduced(lambda: loss_function(y, model(x)), variables, compression, library, **options)


def stepper(model, inner, compression, library=dgc, graph=True, **options):
    """A function of a step's number that makes it, as a custom loop does; ``rank``: whose batch, else this one's."""

    def one(x, y):
        variables = raw(model.trainable_variables)
        gradients = reduced(lambda: loss_function(y, model(x)), variables, compression, library, **options)
        inner.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(one) if graph else one
    return lambda step, rank=None: run(*map(tf.constant, batch(step, rank)))


def compressor(way, model, inner, **options):
    """A compressor for our tape ("wrapper") or Horovod's ("stock"), or none ("dense"); with the tape's library."""
    if way == "dense":
        return None, hvd
    named = (raw(model.trainable_variables),) if way == "stock" else ()
    return dgc.Compression.dgc(*named, optimizer=inner, **options), dgc if way == "wrapper" else hvd


def compiled(inner, model=None, *, wrapped=True, compression=None, process_set=None, op=None, **options):
    """A model compiled with ``inner``, which is made distributed unless ``wrapped`` is False.

    What needs no graph of ours runs without one: building it takes longer than a short training.
    """
    model = model or make_model()
    options.setdefault("run_eagerly", not wrapped)
    given = {"compression": compression, "process_set": process_set, "op": op}
    optimizer = dgck.DistributedOptimizer(inner, **given) if wrapped else inner
    model.compile(optimizer=optimizer, loss=loss_function, **options)
    return model


def eager(inner, compression=None, *, wrapped=True, graph=False):
    """Eager unless ``graph``: so short a training takes less time than building its graph."""
    return compiled(inner, wrapped=wrapped, compression=compression, run_eagerly=not graph)


def fitted(inner, compression=None, *, steps=6, rank=None, wrapped=True, graph=False):
    model = eager(inner, compression, wrapped=wrapped, graph=graph)
    fit(model, steps, rank=rank)
    return model


def compile_model(compression, *, optimizer="momentum", model=None, learning_rate=None, wrapper=True, **arguments):
    """A compiled model; ``wrapper=False`` takes Horovod's own Keras optimizer."""
    model = model or make_model()
    compile_arguments = {k: arguments.pop(k) for k in ("jit_compile", "run_eagerly") if k in arguments}
    inner = keras.optimizers.SGD(schedule() if learning_rate is None else learning_rate, **OPTIMIZERS[optimizer])
    if wrapper:
        distributed = dgck.DistributedOptimizer(inner, compression=compression, **arguments)
    else:
        import horovod.tensorflow.keras as hvd_keras

        if isinstance(compression, dict):
            compression = dgc.Compression.dgc(model.trainable_variables, optimizer=inner, **compression)
        distributed = hvd_keras.DistributedOptimizer(inner, compression=compression, **{"groups": 1, **arguments})
    model.compile(optimizer=distributed, loss=loss_function, **compile_arguments)
    return model


def fit(model, steps=20, first=0, callbacks=(), rank=None, **options):
    x, y = dataset(first + steps, rank)
    x, y = x[8 * first :], y[8 * first :]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": list(callbacks), **options}
    return model.fit(x, y, **options).history


def shared_folder():
    """A folder that all ranks of this job see."""
    return Path(hvd.broadcast_object(tempfile.mkdtemp(prefix="dgc-keras-"), name="folder"))


def barrier():
    hvd.allreduce(tf.zeros(1), name="barrier")


def save(model, path):
    """Rank 0's model; it is there for all ranks afterwards."""
    if hvd.rank() == 0:
        model.save(path)
    barrier()


@contextlib.contextmanager
def warned(part):
    """A list that gets the warnings of the block with this text, when it has ended."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if part in str(w.message)]


def reloaded(model, load=keras.models.load_model, **options):
    """The model as this rank has saved it and loads it again."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        return load(f"{folder}/model.keras", **options)


def assert_close(found, wanted, tolerance):
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        difference = np.abs(a.astype(np.float64) - b).max()
        assert difference <= tolerance * np.abs(b).max(), f"tensor {i}: {difference} against {np.abs(b).max()}"


def assert_equal(found, wanted, message=""):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b, message)


def assert_replicas(arrays):
    for i, array in enumerate(arrays):
        row = tf.constant(np.ascontiguousarray(array).reshape(1, -1))
        everybody = np.asarray(hvd.allgather(row, name=f"replicas{i}"))
        assert (everybody.view(np.uint8) == everybody[:1].view(np.uint8)).all(), f"tensor {i} differs between ranks"


def replicas_differ(arrays):
    try:
        assert_replicas(arrays)
    except AssertionError:
        return True
    return False


def assert_raises(action, *parts, kinds=(Exception,)):
    """``action`` must fail with a message that contains ``parts``; returns the message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            action()
        except kinds as error:
            text = str(error)
            for part in parts:
                assert part in text, f"{part!r} is not in: {text}"
            return text
    raise AssertionError(f"nothing was raised; expected {parts}")
