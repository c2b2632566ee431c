"""What crossing from TensorFlow to the core and back costs in a step, beside the core's own work.

    python benchmarks/tensorflow_adapter.py [--elements 25000000] [--tensors 50] [--steps 10]

One process, with a transport that gives a rank its own message twice: network time is not the question. The core gets
the same gradients twice, once as NumPy arrays and once out of a ``tf.function`` (and out of eager code); the
difference is the adapter's. It is compared with the compress phase of the core and with one copy of the result.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dgc.core.bucket_step import Hyper
from dgc.core.config import make_config
from dgc.tensorflow.crossing import APPLY, cross
from dgc.tensorflow.group import Group


class Loopback:
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    shape = (args.elements // args.tensors // 100, 100)
    gradients = [tf.random.stateless_normal(shape, [1, i]) for i in range(args.tensors)]
    variables = [tf.Variable(tf.zeros(shape), name=f"v{i}") for i in range(args.tensors)]
    config = make_config({"momentum": 0.9})
    hyper = Hyper.uniform(args.tensors, config)
    group = Group(range(args.tensors), [v.name for v in variables], variables, config, Loopback(), 1.0)
    arrays = [np.asarray(g) for g in gradients]

    def core() -> None:
        group.run(arrays, [None] * len(arrays), hyper, None)

    def step(given: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        results, _ = group.run(given, [None] * len(given), hyper, rate)
        return results, APPLY

    @tf.function
    def graph(given: list[tf.Tensor]) -> list[tf.Tensor]:
        return cross(step, given, None)[0]

    def eager() -> None:
        cross(step, gradients, None)

    def null(given: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        return [group._pool.take(i) for i in range(len(given))], APPLY

    @tf.function
    def graph_null(given: list[tf.Tensor]) -> list[tf.Tensor]:
        return cross(null, given, None)[0]

    target = np.empty(args.elements, np.float32)
    source = np.ones(args.elements, np.float32)
    runs: dict[str, Callable[[], object]] = {
        "core": core,
        "graph": lambda: graph(gradients),
        "eager": eager,
        "crossing alone, graph": lambda: graph_null(gradients),
        "crossing alone, eager": lambda: cross(null, gradients, None),
        "one copy of the result": lambda: np.copyto(target, source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    compress = []
    for number in range(args.steps + 2):
        # In turn, so that whatever else the machine does meets all of them.
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
                if name == "core":
                    compress.append(group.exchange.stats.last.seconds["compress"])
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    medians["compress phase"] = 1e3 * statistics.median(compress)
    budget = 0.1 * medians["compress phase"] + medians["one copy of the result"]
    report = {
        "elements": args.elements,
        "tensors": args.tensors,
        "milliseconds": medians,
        "budget_ms": budget,
        "share_of_budget": {k: medians[f"crossing alone, {k}"] / budget for k in ("graph", "eager")},
        "versions": {"tensorflow": tf.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "machine": platform.processor() or platform.machine(),
        "kernels": group.exchange._kernels.name,
    }
    for name, value in medians.items():
        print(f"{name:<26}{value:10.2f} ms")
    print(f"{'10 % of compress + copy':<26}{budget:10.2f} ms")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
