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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import processor

from dgc.torch.contrib.fuse import fuse_optimizer

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
}
PLAIN = "plain (foreach=False)"
TORCH_WAYS = {PLAIN: {"foreach": False}, "torch foreach=True": {"foreach": True}, "torch fused=True": {"fused": True}}
HAS_FUSED = ("SGD", "Adam", "AdamW")


@dataclass(frozen=True)
class Figure:
    """Milliseconds of one step, the fastest of many."""

    optimizer: str
    way: str
    milliseconds: float
    times: float


@dataclass(frozen=True)
class Way:
    """One way to step, and what must happen before each step without counting."""

    name: str
    step: Callable[[], object]
    prepare: Callable[[], None]


def seconds(call: Callable[[], object]) -> float:
    """Time of one call, waiting for the GPU if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ways(name: str, shapes: list[tuple[int, ...]], device: str) -> list[Way]:
    """All ways of one optimizer, each on parameters of its own."""
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

    made = []
    for way, more in TORCH_WAYS.items():
        if more != {"fused": True} or name in HAS_FUSED:
            optimizer, allocate, _ = build(shapes, **more)
            made.append(Way(way, optimizer.step, allocate))
    for kept in (False, True):
        optimizer, allocate, keep = build(shapes)
        fuse_optimizer(optimizer)
        way = "fuse_step, gradients kept" if kept else "fuse_step, new gradients"
        made.append(Way(way, optimizer.fuse_step, keep if kept else allocate))
    total = sum(torch.Size(shape).numel() for shape in shapes)
    optimizer, allocate, _ = build([(total,)])
    made.append(Way("all at once", optimizer.step, allocate))
    return made


def compare(name: str, shapes: list[tuple[int, ...]], device: str, repeats: int) -> list[Figure]:
    """Fastest times; the ways take turns, so that a busy moment of the machine meets all of them."""
    made = ways(name, shapes, device)
    times: dict[str, list[float]] = {way.name: [] for way in made}
    for i in range(repeats + 3):
        for way in made:
            way.prepare()
            took = seconds(way.step)
            if i >= 3:
                times[way.name].append(took)
    milliseconds = {way: 1e3 * min(values) for way, values in times.items()}
    return [Figure(name, way, value, milliseconds[PLAIN] / value) for way, value in milliseconds.items()]


def machine(device: str) -> dict[str, object]:
    """What the figures were taken on."""
    return {
        "cpu": processor(),
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
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    side = round(options.elements**0.5)
    shapes: list[tuple[int, ...]] = [(side, side)] * options.tensors
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
