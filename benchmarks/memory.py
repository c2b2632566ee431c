"""Memory of a rank that DDP, its optimizer and dgc take, in bytes a parameter, over Gloo.

    for each in sgd-dense sgd-classic sgd-ahead adamw-dense adamw-classic adamw-ahead adamw-late; do
        torchrun --nproc-per-node 2 benchmarks/memory.py $each --json benchmarks/results/memory.json
    done

The model has 41.9 million parameters, of which 2 % are sent. The parameters themselves, which were there before, do not
count; gradients, DDP's buckets and the optimizer's state do. One process measures one training, after four steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from machine import facts, one_item_a_line  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import dgc.torch as dgc  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "classic": {"error_feedback": "classic"},
    "ahead": {"error_feedback": "step-ahead"},
    "late": {"error_feedback": "step-ahead", "late": True},
}


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def main() -> None:
    """Measure one training; rank 0 writes the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="sgd or adamw, and dense, classic, ahead or late: adamw-ahead")
    parser.add_argument("--json", type=Path, help="the row is added to this file")
    options = parser.parse_args()
    optimizer_name, way = options.setting.split("-")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(10)))
    size, before = sum(p.numel() for p in net.parameters()), resident()
    model = DistributedDataParallel(net)
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way != "dense":
        dgc.ddp.register(model, optimizer, dgc.Compression.dgc(sparsity=0.98, **OPTIONS[way]))
    inputs = torch.randn(4, 2048)
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    gc.collect()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {"setting": options.setting, "resident": (resident() - before) / size, "peak": (peak - before) / size}
    if dist.get_rank() == 0:
        print(f"{options.setting}: {row['resident']:.1f} bytes a parameter, at most {row['peak']:.1f}")
        if options.json:
            report = json.loads(options.json.read_text()) if options.json.exists() else {"ranks": 2, "rows": []}
            report |= facts("torch", "numpy", "numba")
            report["rows"].append(row)
            options.json.write_text(one_item_a_line(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
