"""What it costs to look into a compressor: ``python benchmarks/inside.py [--rounds 15]``; about half a minute.

ResNet-50's tensors on one rank, without a network: what a step costs besides. In each round a step without a log and
one that is looked at take turns, so that only their ratio counts. At the usual density, and at the first one of a
warm-up, where a step sends 250 times as much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from compress import resnet50
from machine import facts

from dgc.adapter.metrics import Log
from dgc.core.compressors import make_config
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels.choose import choose_kernels
from dgc.core.layout import Parameter, make_layout
from dgc.core.probe import Probe
from dgc.transport.local import run_ranks

RESULTS = Path(__file__).parent / "results"
SPARSITIES = (0.999, 0.75)


class Counting:
    """A writer that counts."""

    calls = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Count."""
        self.calls += 1


def make(transport: Any, sparsity: float, log: Log | None) -> Exchange:
    """An exchange of ResNet-50's tensors, looked into or not."""
    config = make_config({"sparsity": sparsity, "momentum": 0.9})
    layout = make_layout([Parameter(f"p{i}", s, "float32") for i, s in enumerate(resnet50())], config)
    exchange = Exchange(layout, config, transport, choose_kernels("cpu"))
    exchange.probe = None if log is None else Probe(layout, log)
    return exchange


def seconds(exchange: Exchange, gradients: list[np.ndarray], results: list[np.ndarray]) -> tuple[float, float]:
    """One step: of the clock, and of this process on all cores."""
    start, used = time.perf_counter(), time.process_time()
    for i in reversed(range(len(gradients))):
        exchange.submit(i, gradients[i], results[i])
    exchange.finish()
    return time.perf_counter() - start, time.process_time() - used


def measure(sparsity: float, rounds: int) -> dict[str, Any]:
    """Milliseconds of each way, by the median; ratios and differences are of the same round."""
    writer = Counting()

    def alone(transport: Any) -> dict[str, list[tuple[float, float]]]:
        rng = np.random.default_rng(0)
        gradients = [(rng.standard_normal(int(np.prod(s))) * 0.01).astype(np.float32) for s in resnet50()]
        results = [np.empty_like(g) for g in gradients]
        ways = {
            "off": make(transport, sparsity, None),
            "looking": make(transport, sparsity, Log(writer, 1, "", waits=True)),
        }
        names = list(ways)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(rounds + 2):
            for name in names[number % 2 :] + names[: number % 2]:
                found = seconds(ways[name], gradients, results)
                if number >= 2:
                    taken[name].append(found)
        for exchange in ways.values():
            exchange.close()
        return taken

    taken = run_ranks(1, alone, timeout=600)[0]
    rows: dict[str, dict[str, float]] = {}
    for name, each in taken.items():
        rows[name] = {}
        for place, kind in enumerate(("clock", "cpu")):
            pairs = [(a[place], b[place]) for a, b in zip(each, taken["off"], strict=True)]
            rows[name][f"{kind}_milliseconds"] = 1e3 * statistics.median(a for a, _ in pairs)
            rows[name][f"{kind}_more"] = 1e3 * statistics.median(a - b for a, b in pairs)
            rows[name][f"{kind}_ratio"] = statistics.median(a / b for a, b in pairs)
    return {"ways": rows, "scalars_per_look": writer.calls // (rounds + 2)}


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    report = {**facts("numpy", "numba"), "rounds": arguments.rounds, "sparsity": {}}
    for sparsity in SPARSITIES:
        found = report["sparsity"][str(sparsity)] = measure(sparsity, arguments.rounds)
        for name, row in found["ways"].items():
            print(
                f"sparsity {sparsity}: {name:>8} {row['clock_milliseconds']:7.1f} ms ({row['clock_more']:+7.2f}), "
                f"of CPU {row['cpu_milliseconds']:7.1f} ms ({row['cpu_more']:+7.2f}, {row['cpu_ratio']:.3f} x)"
            )
    (arguments.out / "inside.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
