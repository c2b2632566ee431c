"""Whole steps of the compressors that work on a GPU: ``python benchmarks/compressors_gpu.py [--ranks 8]``.

ResNet-50's gradients of one rank, the same in each step, go through the exchange as a training step takes them:
residual, message, and the sum of all ranks' messages, which are this one's. No network: what is timed is this machine's
part, by the host's clock, from an idle device to an idle device. All cases run in turn; a figure is a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from compress import MODELS, MOMENTUM, RESULTS

from dgc.core.collectives import Transport
from dgc.core.compressors import make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.layout import Parameter, make_layout

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dgc 99.9 %": ("dgc", {"sparsity": 0.999, "momentum": MOMENTUM}),
    "dgc 75 %": ("dgc", {"sparsity": 0.75, "momentum": MOMENTUM}),
    "dgc, dense": ("dgc", {"rampup_begin_step": 10**9, "momentum": MOMENTUM}),
    "topk": ("topk", {}),
}


class Echo(Transport):
    """Ranks that all send what this one does."""

    name, rank = "echo", 0

    def __init__(self, size: int) -> None:
        """So many of them."""
        self.size = size

    def allgather(self, message: np.ndarray, gathered: np.ndarray) -> None:
        """Everybody's message is this one's."""
        gathered[...] = message

    def allreduce(self, values: np.ndarray, op: str = "sum") -> None:
        """Of equal values the sum is their multiple."""
        if op == "sum":
            values *= self.size

    def close(self) -> None:
        """There is nothing to close."""


class Ready:
    """A gradient that is there: what stands behind it is an event of the device's own stream."""

    def __init__(self, kernels: Any) -> None:
        """Take the kernels."""
        self.stream = kernels.device.stream
        self._kernels = kernels

    def record(self) -> Any:
        """An event, with its handle."""
        event = self._kernels.device.record()
        return type("Recorded", (), {"handle": int(getattr(event, "ptr", 0)), "event": event})


def make_step(
    name: str, kernels: Any, ranks: int, shapes: list[tuple[int, ...]]
) -> tuple[Callable[[], None], Exchange]:
    """A call that makes one step of a case, and its exchange."""
    algorithm, options = CASES[name]
    config = make_config(options, algorithm=algorithm)
    layout = make_layout([Parameter(str(i), shape, "float32") for i, shape in enumerate(shapes)], config)
    exchange = Exchange(layout, config, Echo(ranks), kernels)
    rng = np.random.default_rng(0)
    sources, gradients = [], []
    for parameter in layout.parameters:
        values = (rng.standard_normal(parameter.numel) * 1e-3).astype(np.float32)
        source, gradient = (kernels.memory.zeros(parameter.numel, np.float32) for _ in range(2))
        kernels.memory.copy_in(source, values)
        sources.append(source)
        gradients.append(gradient)
    kernels.wait()
    ready = Ready(kernels)

    def step() -> None:
        for i in reversed(range(len(gradients))):
            kernels.memory.copy(gradients[i], sources[i])
            exchange.submit(i, gradients[i], gradients[i], ready=ready)
        exchange.finish()
        kernels.wait()

    return step, exchange


def measure(kernels: Any, ranks: int, shapes: list[tuple[int, ...]], repeats: int, warm: int) -> list[dict[str, Any]]:
    """All cases in turn, ``warm`` untimed rounds and ``repeats`` timed ones."""
    cases = {name: make_step(name, kernels, ranks, shapes) for name in CASES}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(warm + repeats):
        for name, (step, _) in cases.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    rows = []
    for name, (_, exchange) in cases.items():
        median = statistics.median(times[name][-repeats:])
        last = exchange.stats.last
        rows.append({"case": name, "milliseconds": 1e3 * median, "bytes_sent": last.bytes_sent, "ranks": ranks})
        exchange.close()
    return rows


def main() -> None:
    """Print a table, and write JSON into the results folder."""
    from compress_gpu import environment

    from dgc.core.kernels.gpu import CupyKernels

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--warm", type=int, default=5, help="rounds before the timed ones")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args()
    kernels = CupyKernels(0)
    rows = measure(kernels, options.ranks, MODELS[options.model](), options.repeats, options.warm)
    print(f"{options.model}, {options.ranks} ranks; {kernels.describe()}")
    for row in rows:
        print(f"{row['case']:<20} {row['milliseconds']:9.3f} ms {row['bytes_sent']:12,} bytes sent")
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {"model": options.model, "environment": environment(kernels), "rows": rows}
    (options.out / "compressors-gpu.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
