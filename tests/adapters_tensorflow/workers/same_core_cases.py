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
    compression = getattr(dgc_tensorflow.Compression, name)(**options)
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
    states = one.state_dict()["parameters"], other.state_dict()["parameters"]
    for n in SHAPES:
        for key, array in states[0][n].items():
            np.testing.assert_array_equal(array, states[1][n][key], f"{name} {n} {key}")
    one.close()
    other.close()


@case
def the_same_gradients_select_the_same_indices_and_leave_the_same_residuals():
    ramp = {"sparsity": [0.75, 0.9, 0.99], "rampup_begin_step": 2, "rampup_step": 3, "min_numel": 64}
    both_agree("dgc", m.SPARSE, 8, momentum=0.9, nesterov=False)
    both_agree("dgc", ramp, 8, momentum=0.9, nesterov=True)
    clipped = {"sparsity": 0.95, "min_numel": 64, "local_grad_clip_norm": 3.0}
    both_agree("dgc", clipped, 8, momentum=0.0, nesterov=False)


if __name__ == "__main__":
    run_cases()
