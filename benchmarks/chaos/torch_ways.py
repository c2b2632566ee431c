"""The training loops of PyTorch in the matrix of chaos: A (stock Horovod), B (our optimizer), and dense Horovod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from rank import Rank, run

import dgc.torch as dgc


class Places(torch.nn.Module):
    """Tells where a step is, in the forward and in the backward pass; changes nothing."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._rank.at("forward")
        if self._rank.fault.where == "forward" and self._rank.fault.name.startswith("memory"):
            x = x + torch.zeros(2**24)[0]
        if x.requires_grad:
            x.register_hook(lambda gradient: self._rank.at("backward"))
        return x


class SGD(torch.optim.SGD):
    """Tells when an update begins; its class is the user's own, as many are."""

    rank: Rank

    def step(self, closure: Any = None) -> Any:
        self.rank.at("update")
        return super().step(closure)


def make(way: str, rank: Rank) -> tuple[torch.nn.Module, Any, Any]:
    """The model, its distributed optimizer, and the compressor (None: dense)."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), Places(rank)]
    model = torch.nn.Sequential(*layers, *[torch.nn.Linear(256, 256) for _ in range(4)], torch.nn.Linear(256, 1))
    SGD.rank = rank
    rank.initialised(hvd.rank())
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rank.wraps()
    compression = None
    if way == "A":
        compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer, sparsity=0.99)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
    elif way == "B":
        compression = dgc.Compression.dgc(sparsity=0.99)
        optimizer = dgc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer, compression


def train(way: str, rank: Rank) -> None:
    """Train a small model until the fault ends it, or to its last step."""
    hvd.init()
    torch.set_num_threads(1)
    model, optimizer, compression = make(way, rank)
    data = torch.Generator().manual_seed(hvd.rank())
    for step in range(rank.steps):
        rank.begin(step)
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
        if rank.fault.where == "outside" and _is_time(rank):
            save(rank.folder / "checkpoint", model, optimizer, compression, step + 1)
            rank.saved()
            return
    rank.finished([p.detach().numpy() for p in model.parameters()])


def _is_time(rank: Rank) -> bool:
    """Whether to save and end: a rank may be told a step before another, so ranks that agree ask each other."""
    if rank.fault.name != "save_agreed":
        return rank.told
    return bool(hvd.allreduce(torch.tensor(float(rank.told)), name="told", op=hvd.Sum))


def save(folder: Path, model: torch.nn.Module, optimizer: Any, compression: Any, step: int) -> None:
    """Write a checkpoint on rank 0, completely or not at all. Called on all ranks."""
    parts = {"model": model, "optimizer": optimizer}
    if compression is not None:
        compression.average(optimizer)
        parts["compression"] = compression
    if hvd.rank() == 0:
        folder.mkdir(exist_ok=True)
        whole = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**whole, "step": step}, folder / "checkpoint.new")
        (folder / "checkpoint.new").rename(folder / "checkpoint.pt")


if __name__ == "__main__":
    run(train)
