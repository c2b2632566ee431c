"""One rank of a job between two hosts: started by ``network_matrix.py``, and told what to do by its command line.

    network_rank.py WAY FAULT FOLDER

It goes on from the checkpoint in FOLDER, if there is one, and leaves a file there at each moment that is waited for.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import horovod.torch as hvd
import torch
from faults import STEPS, VICTIM, Fault
from network_faults import GAP, NETWORK_FAULTS
from rank import Rank
from torch_ways import make, save

EVERY = 2
"""Steps from a checkpoint to the next."""
PAUSE = 0.1
"""Seconds added to each step: a link is cut while there are steps to come."""


class HostRank(Rank):
    """A rank that may be late."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        """Nothing has happened yet."""
        super().__init__(fault, folder)
        self.number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))

    def begin(self, step: int) -> None:
        """A step begins."""
        time.sleep(PAUSE)
        super().begin(step)

    def happen(self, place: str) -> None:
        """Let the fault happen, if this is its place and its rank."""
        super().happen(place)
        if place == self.fault.where and self.number == VICTIM and self.fault.name.startswith("late"):
            time.sleep(GAP)


def main() -> None:
    """Train a small model to its last step, or until the fault ends it."""
    way, fault, folder = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1, file=(Path(folder) / f"stacks.{os.getpid()}").open("w"))
    rank = HostRank(NETWORK_FAULTS[fault], Path(folder))
    rank.happen("init")
    hvd.init()
    torch.set_num_threads(1)
    model, optimizer, compression = make(way, rank)
    rank.mark("pid", str(os.getpid()))
    path = rank.folder / "checkpoint"
    begin = _load(path, model, optimizer, compression)
    rank.mark("begun", str(begin))
    for step in range(begin, STEPS):
        rank.begin(step)
        data = torch.Generator().manual_seed(STEPS * hvd.rank() + step)
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save(path, model, optimizer, compression, step + 1)
    rank.finished([p.detach().numpy() for p in model.parameters()])


def _load(path: Path, model: torch.nn.Module, optimizer: Any, compression: Any) -> int:
    """The number of steps that were made before."""
    if not (path / "checkpoint.pt").exists():
        return 0
    whole = torch.load(path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    if compression is not None:
        compression.load_state_dict(whole["compression"])
    return whole["step"]


if __name__ == "__main__":
    main()
