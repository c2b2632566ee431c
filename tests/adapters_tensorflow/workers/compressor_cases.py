"""Every compressor in TensorFlow: it learns in a loop and in Keras' fit, replicas stay identical, PyTorch agrees."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
import torch
from documented import documented_compressor, own_names
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck
import dgc.torch as dgc_torch

SHAPES = {"a": (64, 48), "b": (48,), "c": (48, 40), "d": (10, 6)}


def gradient(step, name):
    number = list(SHAPES).index(name)
    return np.random.default_rng([step, hvd.rank(), number]).standard_normal(SHAPES[name]).astype(np.float32)


def with_torch(name, options, steps, sgd):
    parameters = {n: torch.nn.Parameter(torch.ones(*s)) for n, s in SHAPES.items()}
    inner = torch.optim.SGD(parameters.values(), lr=1.0, **sgd)
    compression = getattr(dgc_torch.Compression, name)(**options)
    optimizer = dgc_torch.DistributedOptimizer(inner, list(parameters.items()), compression=compression)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        # A loss whose gradients are exactly these arrays, so that Horovod's hooks fire.
        sum((p * torch.from_numpy(gradient(step, n))).sum() for n, p in parameters.items()).backward()
        optimizer.synchronize()
        results.append({n: p.grad.numpy().copy() for n, p in parameters.items()})
        with optimizer.skip_synchronize():
            optimizer.step()
    return results, compression


def with_tensorflow(name, options, steps):
    variables = {n: tf.Variable(tf.ones(s), name=n) for n, s in SHAPES.items()}
    compression = getattr(dgc.Compression, name)(**options)
    results = []
    for step in range(steps):

        def loss(step=step):
            return tf.add_n([tf.reduce_sum(v * gradient(step, n)) for n, v in variables.items()])

        gradients = m.reduced(loss, list(variables.values()), compression)
        results.append({n: g.numpy() for n, g in zip(variables, gradients, strict=True)})
    return results, compression


def both_agree(name, options, steps, **sgd):
    """Results and states have the same bits; ``sgd``: PyTorch's optimizer hands it over, TensorFlow's tape is told."""
    torchs, one = with_torch(name, options, steps, sgd)
    tensorflows, other = with_tensorflow(name, {**options, **sgd}, steps)
    for step, (a, b) in enumerate(zip(torchs, tensorflows, strict=True)):
        for n in SHAPES:
            np.testing.assert_array_equal(a[n], b[n], f"{name} {step} {n}")
    m.assert_replicas(list(tensorflows[-1].values()))
    states = [each.state_dict(own=True)["parameters"] for each in (one, other)]
    for n in SHAPES:
        for key, array in states[0][n].items():
            np.testing.assert_array_equal(array, states[1][n][key], f"{name} {n} {key}")
    one.close()


OPTIONS = {
    "dgc": {"sparsity": 0.9},
    "topk": {"sparsity": 0.9},
    "strom": {"threshold": 0.05, "max_density": 0.1},
}


def check(name):
    options = {"min_numel": 64, **OPTIONS.get(name, {})}
    both_agree(name, {**options, **({"momentum": 0.0} if name == "dgc" else {})}, 6)
    # Keras' fit with its own momentum, which only dgc takes over.
    compression = getattr(dgck.Compression, name)(**options)
    model = m.compiled(m.keras.optimizers.SGD(0.05, momentum=0.5), compression=compression, run_eagerly=True)
    x, y = m.dataset(10, 0)
    before = model.evaluate(x, y, verbose=0)
    m.fit(model, 10)
    m.assert_replicas(m.values(model))
    assert model.evaluate(x, y, verbose=0) < before
    assert compression.stats.steps == 10
    assert compression.stats.last.bytes_sent < compression.stats.last.dense_bytes
    # Stock Horovod's tape.
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    inner = m.keras.optimizers.SGD(0.05)
    compression = getattr(dgc.Compression, name)(variables, optimizer=inner, **options)
    step = m.stepper(model, inner, compression, hvd, graph=False)
    for number in range(3):
        step(number)
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
def the_same_gradients_select_the_same_indices_and_leave_the_same_residuals():
    ramp = {"sparsity": [0.75, 0.9, 0.99], "rampup_begin_step": 2, "rampup_step": 3, "min_numel": 64}
    both_agree("dgc", m.SPARSE, 8, momentum=0.9, nesterov=False)
    both_agree("dgc", ramp, 8, momentum=0.9, nesterov=True)
    clipped = {"sparsity": 0.95, "min_numel": 64, "local_grad_clip_norm": 3.0}
    both_agree("dgc", clipped, 8, momentum=0.0, nesterov=False)
