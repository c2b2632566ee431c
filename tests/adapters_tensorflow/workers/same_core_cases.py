"""Both adapters, fed with the same arrays on the same ranks, do the same to the last bit: there is one core."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
import torch
from worker_tools import case, run_cases

import dgc.tensorflow as dgc_tensorflow
import dgc.torch as dgc_torch

SHAPES = {"a": (64, 48), "b": (48,), "c": (48, 40), "d": (10, 6)}


def gradient(step, name):
    number = list(SHAPES).index(name)
    return np.random.default_rng([step, hvd.rank(), number]).standard_normal(SHAPES[name]).astype(np.float32)


def with_torch(steps, momentum, nesterov, **options):
    parameters = {n: torch.nn.Parameter(torch.ones(*s)) for n, s in SHAPES.items()}
    inner = torch.optim.SGD(parameters.values(), lr=1.0, momentum=momentum, nesterov=nesterov)
    compression = dgc_torch.Compression.dgc(**options)
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
    return results, compression.state_dict()


def with_tensorflow(steps, momentum, nesterov, **options):
    variables = {n: tf.Variable(tf.ones(s), name=n) for n, s in SHAPES.items()}
    compression = dgc_tensorflow.Compression.dgc(momentum=momentum, nesterov=nesterov, **options)
    results = []
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * gradient(step, n)) for n, v in variables.items()])
        tape = dgc_tensorflow.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, list(variables.values()))
        results.append({n: g.numpy() for n, g in zip(variables, gradients, strict=True)})
    return results, compression.state_dict()


@case
def the_same_gradients_select_the_same_indices_and_leave_the_same_residuals():
    for momentum, nesterov, options in (
        (0.9, False, m.SPARSE),
        (0.9, True, {"sparsity": [0.75, 0.9, 0.99], "rampup_begin_step": 2, "rampup_step": 3, "min_numel": 64}),
        (0.0, None, {"sparsity": 0.95, "min_numel": 64, "local_grad_clip_norm": 3.0}),
    ):
        torchs, torch_state = with_torch(8, momentum, bool(nesterov), **options)
        tensorflows, tensorflow_state = with_tensorflow(8, momentum, nesterov, **options)
        for step, (a, b) in enumerate(zip(torchs, tensorflows, strict=True)):
            for name in SHAPES:
                np.testing.assert_array_equal(np.flatnonzero(a[name]), np.flatnonzero(b[name]), f"{step} {name}")
                np.testing.assert_array_equal(a[name], b[name], f"{step} {name}")
        for name in SHAPES:
            for key, array in torch_state["parameters"][name].items():
                np.testing.assert_array_equal(array, tensorflow_state["parameters"][name][key], f"{name} {key}")


if __name__ == "__main__":
    run_cases()
