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
    return {"model": model, "optimizer": optimizer, "compression": compression}


def step_once(job, step):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    job["optimizer"].zero_grad()
    nn.functional.cross_entropy(job["model"](x), x[:, :5].argmax(1)).backward()
    job["optimizer"].step()


def mean_residual(job):
    """What is still to be applied to one layer."""
    own = job["compression"].state_dict()["parameters"]["0.weight"]["v"].double()
    dist.all_reduce(own)
    return (own / dist.get_world_size()).tolist()


def digest(job):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in job["model"].parameters())).hexdigest()


def main():
    folder, steps, dies_after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    died = folder / f"died-{dist.get_world_size()}"
    job, start = build(), 0
    if (folder / "checkpoint.pt").exists():
        start = dgc.load_checkpoint(folder, **job, resize=True)
        report({"loaded": start, "residual": mean_residual(job)})
    for step in range(start, steps):
        step_once(job, step)
        if step % 2:
            dgc.save_checkpoint(folder, **job, extra=step + 1)
            report({"saved": step + 1, "residual": mean_residual(job)})
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
