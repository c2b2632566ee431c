"""Train under torchrun with a checkpoint every other step; the last rank may end itself by kill -9, once."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from worker_tools import report

import dgc.torch as dgc


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
    compression = dgc.Compression.dgc(sparsity=0.9)
    optimizer = dgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), compression=compression
    )
    return model, optimizer, compression


def step_once(job, step):
    """Every other step ends with an average; returns whether this one did."""
    model, optimizer, compression = job
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
    optimizer.step()
    if step % 2:
        compression.average(optimizer)
    return step % 2


def save(job, path, steps):
    if dist.get_rank() == 0:
        torch.save([steps, *(each.state_dict() for each in job)], path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    report({"saved": steps, "residual": mean_residual(job)})


def load(job, path):
    steps, *states = torch.load(path, weights_only=True)
    for each, state in zip(job, states, strict=True):
        each.load_state_dict(state)
    report({"loaded": steps, "residual": mean_residual(job)})
    return steps


def mean_residual(job):
    """What is still to be applied to one layer."""
    own = job[2].state_dict(own=True)["parameters"]["0.weight"]["v"].double()
    dist.all_reduce(own)
    return (own / dist.get_world_size()).tolist()


def digest(job):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in job[0].parameters())).hexdigest()


def main():
    folder, steps, dies_after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    died, path = folder / f"died-{dist.get_world_size()}", folder / "checkpoint.pt"
    job = build()
    for step in range(load(job, path) if path.exists() else 0, steps):
        if step_once(job, step):
            save(job, path, step + 1)
        if step == dies_after and dist.get_rank() == dist.get_world_size() - 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    straight = build()
    for step in range(steps):
        step_once(straight, step)
    report({"digest": digest(job), "straight": digest(straight)})


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
