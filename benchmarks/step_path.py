"""Count the files, functions and calls of the package that one steady training step passes, on all threads.

Usage:
    mpirun -np 2 python benchmarks/step_path.py           dgc's optimizer, under Horovod
    torchrun --nproc-per-node 2 benchmarks/step_path.py   DDP's hook
"""

from __future__ import annotations

import collections
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dgc
import dgc.torch as dgc_torch

HOME = str(Path(dgc.__file__).parent)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression = dgc_torch.Compression.dgc(sparsity=0.99)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(model)
        dgc_torch.ddp.register(model, optimizer, compression)
    else:
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        optimizer = dgc_torch.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    x = torch.randn(8, 64)
    calls: collections.Counter[Any] = collections.Counter()
    counting = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if counting and event == "call" and frame.f_code.co_filename.startswith(HOME):
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    threading.setprofile(profile)  # of the communication thread, which starts with the first step
    sys.setprofile(profile)
    for step in range(6):
        counting = step == 5
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    counting = False
    sys.setprofile(None)
    if rank == 0:
        files = {file for file, _ in calls}
        print(f"{len(files)} files, {len(calls)} functions, {sum(calls.values())} calls")
        if "-v" in sys.argv:
            for file in sorted(files):
                inside = {name: n for (f, name), n in calls.items() if f == file}
                print(f"  {file[len(HOME) + 1 :]}: {len(inside)} functions, {sum(inside.values())} calls")


if __name__ == "__main__":
    main()
