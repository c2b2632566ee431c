"""PyTorch's and TensorFlow's DGCMomentum, fed with the same arrays on the same ranks, give the same parameters."""

import itertools

import adapters_tensorflow.workers.models as m
import horovod.torch
import momentum_models as mm
import numpy as np
import torch
from worker_tools import case, run_cases

import dgc.tensorflow as dgc_tensorflow
import dgc.torch as dgc_torch


def with_torch(steps, **options):
    own = [torch.nn.Parameter(torch.from_numpy(v.numpy())) for v in mm.make_variables()]
    optimizer = dgc_torch.DGCMomentum(own, 0.1, 0.9, **options)
    for step in range(steps):
        for i, p in enumerate(own):
            p.grad = torch.from_numpy(mm.gradient(tuple(p.shape), step, i))
        optimizer.step()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return [p.detach().numpy() for p in own], [{k: b.numpy() for k, b in state[i].items()} for i in range(len(own))]


def with_tensorflow(steps, **options):
    own = mm.make_variables()
    optimizer = dgc_tensorflow.DGCMomentum(0.1, 0.9, **options)
    mm.train_in_graph(optimizer, own, steps)
    state = optimizer.state_dict()["parameters"]
    optimizer.close()
    return mm.arrays(own), [state[f"w{i}"] for i in range(len(own))]


@case
def the_same_gradients_give_the_same_parameters():
    decays = {"none": (None, None), "L1": (dgc_torch.L1Decay(1e-3), dgc_tensorflow.L1Decay(1e-3))}
    decays["L2"] = (dgc_torch.L2Decay(1e-2), dgc_tensorflow.L2Decay(1e-2))
    for number, (nesterov, kind) in enumerate(itertools.product((False, True), decays)):
        clip = (None, 1.5)[number % 2]  # every two options meet
        options = dict(
            rampup_begin_step=3,
            rampup_step=5,
            sparsity=[0.75, 0.99],
            use_nesterov=nesterov,
            local_grad_clip_norm=clip,
            num_trainers=horovod.torch.size(),
        )
        ours, state = with_tensorflow(12, regularization=decays[kind][1], **options)
        theirs, torch_state = with_torch(12, regularization=decays[kind][0], **options)
        m.assert_close(ours, theirs, 1e-6)
        m.assert_replicas(ours)
        for i in range(2):
            for key in ("u", "v"):
                scale = np.abs(torch_state[i][key]).max()
                np.testing.assert_allclose(state[i][key], torch_state[i][key], atol=2e-6 * scale)


if __name__ == "__main__":
    run_cases()
