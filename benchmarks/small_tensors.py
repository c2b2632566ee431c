"""A step with very many small tensors, where what each tensor costs counts and no byte does.

    python benchmarks/small_tensors.py [--tensors 10000] [--elements 64] [--rounds 10] [--ranks 2]

Starts its own ranks by ``mpirun``. In each round every way takes a step in turn, so that only their ratio counts: dense
Horovod, ``dgc.torch.DistributedOptimizer`` and stock Horovod's optimizer with our ``compression=``, all
with momentum SGD. Seconds of the process's CPU in all its threads stand beside those of the clock. ``--profile A``
prints where Python spends the time of one way's steps on rank 0.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.metadata
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RANKS = "DGC_SMALL_TENSORS_RANKS"
WARM_UP = 3


def make(way: str, tensors: int, elements: int) -> tuple[list[Any], Any]:
    """Parameters and their optimizer: ``way`` is dense, A or B."""
    import horovod.torch as hvd
    import torch

    import dgc.torch as dgc

    parameters = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9)
    if way == "B":
        return parameters, dgc.DistributedOptimizer(optimizer, named, compression=dgc.Compression.dgc())
    if way == "A":
        compression = dgc.Compression.dgc(named, optimizer=optimizer)
        return parameters, hvd.DistributedOptimizer(optimizer, named, compression=compression)
    return parameters, hvd.DistributedOptimizer(optimizer, named)


def step(parameters: list[Any], optimizer: Any) -> None:
    """A backward pass that costs next to nothing, and the update."""
    import torch

    torch.stack([p.sum() for p in parameters]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def rank(arguments: argparse.Namespace) -> None:
    """What every rank does."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    ways = [arguments.profile] if arguments.profile else ["dense", "B", "A"]
    made = {way: make(way, arguments.tensors, arguments.elements) for way in ways}
    for way in ways:
        for _ in range(WARM_UP):
            step(*made[way])
    if arguments.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(arguments.rounds):
            step(*made[arguments.profile])
        profile.disable()
        if hvd.rank() == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    wall: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            hvd.barrier()
            start, used = time.perf_counter(), time.process_time()
            step(*made[way])
            wall[way].append(time.perf_counter() - start)
            cpu[way].append(time.process_time() - used)
    if hvd.rank() == 0:
        write(arguments, wall, cpu)


def write(arguments: argparse.Namespace, wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    """Print medians and ratios to dense, and keep them."""
    report: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "horovod", "numpy", "mpi4py")},
        "tensors": arguments.tensors,
        "elements": arguments.elements,
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "ways": {},
    }
    print(f"{arguments.tensors} tensors of {arguments.elements} elements, {arguments.ranks} ranks")
    for way, seconds in wall.items():
        ratios = [a / b for a, b in zip(seconds, wall["dense"], strict=True)]
        row = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "cpu_seconds": statistics.median(cpu[way]),
        }
        report["ways"][way] = row
        print(f"{way:>6}  {row['seconds']:.3f} s  {row['ratio']:.2f} x dense  ({row['cpu_seconds']:.3f} s of CPU)")
    path = arguments.out / "small-tensors.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--profile", choices=("dense", "A", "B"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if os.environ.get(RANKS):
        rank(arguments)
        return
    command = ["mpirun", "--oversubscribe", "-np", str(arguments.ranks), sys.executable, __file__, *sys.argv[1:]]
    subprocess.run(command, env={**os.environ, RANKS: "1", "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main()
