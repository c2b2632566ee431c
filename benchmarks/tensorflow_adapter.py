"""What crossing from TensorFlow to the core and back costs in a step, beside the core's own work.

    python benchmarks/tensorflow_adapter.py [--elements 25000000] [--tensors 50] [--rounds 30]

One process, with a transport that gives a rank its own message twice: network time is not the question. The same
gradients go to the same exchange as NumPy arrays ("core"), and through what the tape and all optimizers call, out of a
``tf.function`` ("graph") and out of eager code. Each round runs all of them in a changing order, and a round's
difference to its own core run is the adapter's cost: on a shared machine only such pairs compare. The target is 10 % of
the core's compress phase plus one copy of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from machine import processor

from dgc.core.collectives import Transport
from dgc.tensorflow.adoption import Adoption
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.reduce import Reducer
from dgc.tensorflow.tensors import APPLY, cross

PATHS = ("graph", "eager")
WARM_UP = 3


class Loopback(Transport):
    """Two ranks that always send the same."""

    rank, size, name = 0, 2, "loopback"

    def allgather(self, message: np.ndarray, out: np.ndarray) -> None:
        """Every rank sent ``message``."""
        out[:] = message

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Every rank had ``array``."""
        if op == "sum":
            array *= 2

    def close(self) -> None:
        """Nothing to do."""


class LoopbackCompressor(DGCCompressor):
    """Exchanges with itself, where a compressor in one process would do nothing."""

    def bind(self, variables: Any, optimizer: Any = None, process_set: Any = None) -> None:
        """Make the engine once."""
        if self.engine is None:
            self.engine = Engine(variables, self.config, Loopback(), Adoption(None, self.config), 1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    shape = (args.elements // args.tensors // 100, 100)
    gradients = [tf.random.stateless_normal(shape, [1, i]) for i in range(args.tensors)]
    variables = [tf.Variable(tf.zeros(shape), name=f"v{i}") for i in range(args.tensors)]
    compressor = LoopbackCompressor({"momentum": 0.9})
    reducer = Reducer(compressor)

    @tf.function
    def graph(given: list[tf.Tensor]) -> list[tf.Tensor]:
        return reducer.reduce(given, variables)[0]

    graph(gradients)
    engine = compressor.engine
    assert engine is not None
    arrays = [np.asarray(g) for g in gradients]

    def null(given: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        return [engine._pool.take(i) for i in range(len(given))], APPLY

    @tf.function
    def graph_null(given: list[tf.Tensor]) -> list[tf.Tensor]:
        return cross(null, given, None)[0]

    target, source = (np.ones(args.elements, np.float32) for _ in range(2))
    runs: dict[str, Callable[[], object]] = {
        "core": lambda: engine.run(engine.members, arrays, None, [], follows=True),
        "graph": lambda: graph(gradients),
        "eager": lambda: reducer.reduce(gradients, variables),
        "crossing alone, graph": lambda: graph_null(gradients),
        "crossing alone, eager": lambda: cross(null, gradients, None),
        "one copy of the result": lambda: np.copyto(target, source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    seconds["compress phase"] = []
    names = list(runs)
    for number in range(args.rounds + WARM_UP):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            runs[name]()
            spent = time.perf_counter() - begin
            if number >= WARM_UP:
                seconds[name].append(spent)
                if name == "core":
                    seconds["compress phase"].append(engine.exchange.stats.last.seconds["compress"])
    report = summary(args, seconds)
    report["kernels"] = engine.exchange.kernels.name
    for name, value in report["milliseconds"].items():
        print(f"{name:<28}{value:10.2f} ms")
    print(f"{'10 % of compress + one copy':<28}{report['budget_ms']:10.2f} ms")
    for path in PATHS:
        low, middle, high = report["overhead_ms"][path]
        share = report["share_of_budget"][path]
        print(f"{path} beyond the core: {middle:.2f} ms (quartiles {low:.2f} to {high:.2f}), {share:.0%} of the budget")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def summary(args: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the quartiles of what each path takes longer than the core in the same round."""
    medians = {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()}
    budget = 0.1 * medians["compress phase"] + medians["one copy of the result"]
    overhead = {}
    for path in PATHS:
        differences = [1e3 * (a - b) for a, b in zip(seconds[path], seconds["core"], strict=True)]
        overhead[path] = [round(q, 3) for q in statistics.quantiles(differences, n=4)]
    return {
        "elements": args.elements,
        "tensors": args.tensors,
        "rounds": args.rounds,
        "milliseconds": medians,
        "budget_ms": round(budget, 3),
        "overhead_ms": overhead,
        "share_of_budget": {path: round(overhead[path][1] / budget, 3) for path in PATHS},
        "crossing_share_of_budget": {p: round(medians[f"crossing alone, {p}"] / budget, 3) for p in PATHS},
        "versions": {"tensorflow": tf.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "machine": processor(),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
