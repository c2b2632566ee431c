"""Step time of many small parameters: plain, torch's foreach and fused kernels, and ``fuse_step``.

``python benchmarks/fuse.py [--json FILE]``. One row per optimizer; "times" is plain / this. Of ``fuse_step`` there
are two figures: gradients that stay where they are (``zero_grad(set_to_none=False)``), and gradients that every
backward pass allocates anew (torch's default), which are copied first. "all at once" is the limit: the same optimizer
on one parameter with as many elements.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dgc.torch.fuse import fuse_optimizer

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
}
HAS_FUSED = ("SGD", "Adam", "AdamW")


@dataclass(frozen=True)
class Figure:
    """Median milliseconds of one step."""

    optimizer: str
    way: str
    milliseconds: float
    times: float


def measure(step: Callable[[], object], prepare: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of ``step``; ``prepare`` runs before each and does not count."""
    times = []
    for i in range(repeats + 3):
        prepare()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def compare(name: str, shapes: list[tuple[int, ...]], device: str, repeats: int) -> list[Figure]:
    """All ways of one optimizer."""
    cls, options = OPTIMIZERS[name]

    def build(shapes: list[tuple[int, ...]], **more: bool) -> tuple[torch.optim.Optimizer, Callable, Callable]:
        params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]

        def allocate() -> None:
            for p in params:
                p.grad = torch.ones_like(p)

        def keep() -> None:
            if params[0].grad is None:
                allocate()

        return cls(params, **options, **more), allocate, keep

    milliseconds = {}
    ways: dict[str, dict[str, bool]] = {
        "plain (foreach=False)": {"foreach": False},
        "torch foreach=True": {"foreach": True},
    }
    if name in HAS_FUSED:
        ways["torch fused=True"] = {"fused": True}
    for way, more in ways.items():
        optimizer, allocate, _ = build(shapes, **more)
        milliseconds[way] = measure(optimizer.step, allocate, repeats)
    optimizer, allocate, keep = build(shapes)
    fuse_optimizer(optimizer)
    milliseconds["fuse_step, new gradients"] = measure(optimizer.fuse_step, allocate, repeats)
    milliseconds["fuse_step, gradients kept"] = measure(optimizer.fuse_step, keep, repeats)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    optimizer, allocate, _ = build([(total,)])
    milliseconds["all at once"] = measure(optimizer.step, allocate, repeats)
    plain = milliseconds["plain (foreach=False)"]
    return [Figure(name, way, value, plain / value) for way, value in milliseconds.items()]


def machine(device: str) -> dict[str, object]:
    """What the figures were taken on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names) or None,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Print a table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--elements", type=int, default=64, help="of each tensor, a square matrix")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    side = round(options.elements**0.5)
    shapes = [(side, side)] * options.tensors
    figures = [figure for name in OPTIMIZERS for figure in compare(name, shapes, options.device, options.repeats)]
    print(f"{options.tensors} tensors of {side} x {side} on {options.device}")
    print(f"{'optimizer':<10} {'way':<28} {'ms':>9} {'times':>7}")
    for figure in figures:
        print(f"{figure.optimizer:<10} {figure.way:<28} {figure.milliseconds:9.3f} {figure.times:7.1f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": machine(options.device),
            "tensors": options.tensors,
            "shape": [side, side],
            "figures": [asdict(figure) for figure in figures],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
