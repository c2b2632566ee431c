"""Processor time of the work between and after the collectives, on many ranks of one process.

    taskset -c 0 python benchmarks/many_ranks_work.py --ranks 16 --json benchmarks/results/many-ranks-work.json

Every rank is a thread with the core's own exchange of a matrix of ``--parameters`` elements. The times are those of one
rank's communication thread (``time.thread_time``), medians over its steps: ``apply`` adds up what came, in both ways of
exchanging; ``write_parts`` writes the parts for the owners, and ``add_up`` adds the parts that came and selects sums.
"""

from __future__ import annotations

import argparse
import collections
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402
from machine import facts, one_item_a_line  # noqa: E402

from dgc.core.compressors import make_config  # noqa: E402
from dgc.core.exchange.bucket import BucketExchange  # noqa: E402
from dgc.core.exchange.exchange import Exchange  # noqa: E402
from dgc.core.exchange.owners import Owners  # noqa: E402
from dgc.core.kernels.cpu import NumbaKernels  # noqa: E402
from dgc.core.layout import Parameter, make_layout  # noqa: E402
from dgc.transport.local import run_ranks  # noqa: E402

TAKEN: dict[str, list[float]] = collections.defaultdict(list)


def timed(owner: type, method: str, name: str) -> None:
    """Note the thread's processor time of each call of a method under ``name``."""
    usual = getattr(owner, method)

    @functools.wraps(usual)
    def call(*arguments: Any) -> Any:
        since = time.thread_time()
        result = usual(*arguments)
        TAKEN[name].append(time.thread_time() - since)
        return result

    setattr(owner, method, call)


def steps(transport: Any, options: dict[str, Any], elements: int, count: int) -> None:
    """Run a rank's steps."""
    config = make_config(options)
    layout = make_layout([Parameter("matrix", (elements // 1024, 1024), "float32")], config)
    exchange = Exchange(layout, config, transport, NumbaKernels(1))
    values = np.random.default_rng(transport.rank).standard_normal(layout.numel + 1024 * count, np.float32) ** 3
    result = np.empty(layout.numel, np.float32)
    for step in range(count):
        exchange.submit(0, values[1024 * step :][: layout.numel], result)
        exchange.finish()
    exchange.close()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    timed(Owners, "write_parts", "write_parts")
    timed(Owners, "add_up_parts", "add_up")
    timed(BucketExchange, "_add_up", "apply")
    rows = []
    for density in (0.001, 1 / 64, 0.05):
        for way in ("gather", "auto"):
            TAKEN.clear()
            run_ranks(given.ranks, steps, {"sparsity": 1 - density, "exchange": way}, given.parameters, given.steps)
            half = {name: seconds[len(seconds) // 2 :] for name, seconds in TAKEN.items()}
            row = {"density": density, "exchange": way, "ranks": given.ranks, "parameters": given.parameters}
            row |= {f"{name}_ms": round(1e3 * statistics.median(seconds), 3) for name, seconds in half.items()}
            rows.append(row)
            print(row, flush=True)
    if given.json:
        given.json.write_text(one_item_a_line({"machine": facts(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
