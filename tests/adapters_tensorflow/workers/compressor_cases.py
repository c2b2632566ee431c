"""Every compressor in TensorFlow: it learns in a loop and in Keras' fit, replicas stay identical, PyTorch agrees."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
import torch
from documented import documented_compressor, own_names
from same_core_cases import SHAPES, gradient
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
import dgc.torch as dgc_torch

OPTIONS = {
    "dgc": {"sparsity": 0.9},
    "topk": {"sparsity": 0.9},
    "strom": {"threshold": 0.05, "max_density": 0.1},
}
MORE = [
    ("topk", {"threshold": "global", "sparsity": 0.9}),
    ("qsgd", {"coding": "elias", "bits": 2}),
    ("adacomp", {"momentum": 0.9, "momentum_masking": True}),
    ("onebit", {"means": "row", "momentum": 0.9, "nesterov": True}),
]
STEPS = 6


def options_of(name, options=None):
    return {"min_numel": 64, **OPTIONS.get(name, {}), **(options or {})}


def with_torch(name, options):
    parameters = {n: torch.nn.Parameter(torch.ones(*s)) for n, s in SHAPES.items()}
    inner = torch.optim.SGD(parameters.values(), lr=1.0)
    compression = getattr(dgc_torch.Compression, name)(**options)
    optimizer = dgc_torch.DistributedOptimizer(inner, list(parameters.items()), compression=compression)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        sum((p * torch.from_numpy(gradient(step, n))).sum() for n, p in parameters.items()).backward()
        optimizer.synchronize()
        results.append({n: p.grad.numpy().copy() for n, p in parameters.items()})
        with optimizer.skip_synchronize():
            optimizer.step()
    compression.close()
    return results


def with_tensorflow(name, options):
    variables = {n: tf.Variable(tf.ones(s), name=n) for n, s in SHAPES.items()}
    compression = getattr(dgc.Compression, name)(**options)
    results = []
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * gradient(step, n)) for n, v in variables.items()])
        tape = dgc.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, list(variables.values()))
        results.append({n: g.numpy() for n, g in zip(variables, gradients, strict=True)})
    compression.close()
    return results


def both_agree(name, options):
    if name == "dgc":
        options = {"momentum": 0.0, **options}
    torchs, tensorflows = with_torch(name, options), with_tensorflow(name, options)
    for step, (a, b) in enumerate(zip(torchs, tensorflows, strict=True)):
        for n in SHAPES:
            np.testing.assert_array_equal(a[n], b[n], f"{name} {step} {n}")
    m.assert_replicas(list(tensorflows[-1].values()))


def check(name):
    both_agree(name, options_of(name))
    # Keras' fit with its own momentum, which only dgc takes over.
    model = m.make_model()
    inner = m.keras.optimizers.SGD(0.05, momentum=0.5)
    compression = getattr(dgck.Compression, name)(**options_of(name))
    model.compile(optimizer=dgck.DistributedOptimizer(inner, compression=compression), loss=m.loss_function)
    x, y = m.dataset(10, 0)
    before = model.evaluate(x, y, verbose=0)
    m.fit(model, 10)
    m.fit(model, 10)
    m.assert_replicas(m.values(model))
    assert model.evaluate(x, y, verbose=0) < before
    assert compression.stats.steps == 20
    assert compression.stats.last.bytes_sent < compression.stats.last.dense_bytes
    # Stock Horovod's tape.
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    inner = m.keras.optimizers.SGD(0.05)
    compression = getattr(dgc.Compression, name)(variables, optimizer=inner, **options_of(name))
    for step in range(3):
        x, y = m.batch(step)
        with tf.GradientTape() as tape:
            loss = m.loss_function(y, model(tf.constant(x)))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        inner.apply_gradients(zip(tape.gradient(loss, variables), model.trainable_variables, strict=True))
    m.assert_replicas(m.values(model))


for _name in own_names():

    def _one(name=_name):
        check(name)

    _one.__name__ = _name
    case(_one)


@case
def the_documented_compressor_of_ones_own():
    check(documented_compressor()[1])


@case
def frameworks_agree_on_options_too():
    for name, options in MORE:
        both_agree(name, {"min_numel": 64, **options})


@case
def wrappers_that_are_compressors():
    members = {0: None, 3: dgc.Compression.qsgd(), 6: dgc.Compression.topk(sparsity=0.9)}
    model = m.make_model()
    compression = dgck.Compression.by_step(members, min_numel=64)
    inner = m.keras.optimizers.SGD(0.05, momentum=0.5)
    model.compile(optimizer=dgck.DistributedOptimizer(inner, compression=compression), loss=m.loss_function)
    m.fit(model, 10)
    m.assert_replicas(m.values(model))
    assert compression.stats.last.density < 0.2


@case
def a_saved_model_remembers_its_compressor():
    from dgc.tensorflow.reduce.settings import Settings

    settings = Settings(dgc.Compression.qsgd(bits=8))
    again = Settings.from_config(settings.to_config())
    assert again.compression.config == settings.compression.config
    assert again.compression.config.algorithm == "qsgd"


if __name__ == "__main__":
    run_cases()
