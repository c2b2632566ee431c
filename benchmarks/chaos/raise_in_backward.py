"""One rank raises while another is in its backward pass: does the job always end?

    python benchmarks/chaos/raise_in_backward.py --runs 50 --ways A          # stock Horovod, our compression=
    python benchmarks/chaos/raise_in_backward.py --runs 50 --ways A B dense --launcher gloo

Many small layers, so that gradients are handed to Horovod at every moment of its shutdown. Each run is a job of two
ranks; one that has not ended after ``--limit`` seconds counts as hung, is shown with its stacks (where gdb is
installed), and is ended. Prints one line of JSON for each way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

from launch_tools import environment_for, kill_tree, launch_command  # noqa: E402
from stacks import stacks_of  # noqa: E402

LAYERS = 300


def train(way: str, transport: Any, after: float) -> None:
    """What each rank runs: train, until rank 1 raises ``after`` seconds after the third step."""
    import horovod.torch as hvd
    import torch

    import dgc.torch as dgc

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    names = model.named_parameters()
    if way == "A":
        compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer, transport=transport)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
    elif way == "B":
        compression = dgc.Compression.dgc(transport=transport)
        optimizer = dgc.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
    x = torch.randn(4, 8)
    for step in range(100_000):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        if step == 3 and hvd.rank() == 1:
            time.sleep(after)
            raise ValueError("a rank fails")
        loss.backward()
        optimizer.step()


def main() -> None:
    """Start the jobs and count how they end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ways", nargs="+", default=["A"], choices=["A", "B", "dense"])
    parser.add_argument("--launcher", default="mpirun", choices=["mpirun", "gloo"])
    parser.add_argument("--transport", default="auto", choices=["auto", "mpi", "horovod"])
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a job counts as hung")
    parser.add_argument("--rank", nargs=2, metavar=("WAY", "AFTER"), help="used for the ranks themselves")
    options = parser.parse_args()
    if options.rank:
        train(options.rank[0], options.transport, float(options.rank[1]))
        return
    for way in options.ways:
        hung, seconds, codes = 0, [], set()
        for run in range(options.runs):
            own = [
                str(Path(__file__).resolve()),
                "--rank",
                way,
                str(1e-3 * (run % 20)),
                "--transport",
                options.transport,
            ]
            begun = time.monotonic()
            job = subprocess.Popen(
                [*launch_command(options.launcher, 2), sys.executable, *own],
                env=environment_for({}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                codes.add(job.wait(options.limit))
                seconds.append(time.monotonic() - begun)
                print(f"{way}, run {run + 1}: ended after {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
            except subprocess.TimeoutExpired:
                hung += 1
                print(f"{way}, run {run + 1}: HANGS", file=sys.stderr, flush=True)
                ranks = psutil.Process(job.pid).children(recursive=True)
                print(stacks_of(ranks), file=sys.stderr, flush=True)
            finally:
                kill_tree(job)
        longest = round(max(seconds, default=0.0), 1)
        found = {"way": way, "launcher": options.launcher, "transport": options.transport, "runs": options.runs}
        print(json.dumps({**found, "hung": hung, "longest_seconds": longest, "returned": sorted(codes)}), flush=True)


if __name__ == "__main__":
    main()
