"""Bytes through a rank in a step, gathered and as dgc chooses: ``python benchmarks/many_ranks_bytes.py``.

They follow from the plans alone, so they are the same on every machine. What passes through a rank: all messages but
its own in an allgather or an alltoall, 2 (P - 1) / P of a vector in an allreduce (rings). Beside them Ok-Topk's formula
6 k (P - 1) / P and the lower bound 2 k, in words of 4 bytes: that paper sends a position and a value as two words.
Writes ``benchmarks/results/many-ranks-bytes.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress import resnet50

from dgc.core.compressors import make_config
from dgc.core.config import entries_to_send
from dgc.core.exchange.choice import entry_plan
from dgc.core.layout import Layout, Parameter, make_layout

RANKS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
DENSITIES = [0.001, 1 / 64, 0.05]


def gpt2() -> list[tuple[int, ...]]:
    """List the shapes of a transformer with 124 million parameters."""
    width = 768
    block: list[tuple[int, ...]] = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width)]
    block += [(4 * width,), (width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
    return [(50257, width), (1024, width), *(12 * block), (width,), (width,)]


MODELS = {"resnet50": resnet50, "gpt2": gpt2}
RESULT = Path(__file__).parent / "results" / "many-ranks-bytes.json"


def through_a_rank(layout: Layout, density: float, ranks: int, exchange: str) -> tuple[int, int]:
    """Return the bytes that pass through a rank, and how many buckets have owners."""
    config = make_config({"exchange": exchange})
    plans = [entry_plan(bucket, config, density, ranks) for bucket in layout.buckets]
    return round(sum(plan.traffic.nbytes for plan in plans)), sum(plan.way == "owners" for plan in plans)


def main() -> None:
    """Print the table and write the result."""
    rows = []
    for model, shapes in MODELS.items():
        tensors = [Parameter(str(i), shape, "float32") for i, shape in enumerate(shapes())]
        layout = make_layout(tensors, make_config({}))
        for density in DENSITIES:
            k = sum(entries_to_send(s.length, density) for b in layout.buckets for s in b.sparse)
            for ranks in RANKS:
                dense = 2 * (ranks - 1) / ranks * 4 * layout.numel
                gathered, _ = through_a_rank(layout, density, ranks, "gather")
                owners, dealt = through_a_rank(layout, density, ranks, "auto")
                row: dict[str, Any] = {"model": model, "parameters": layout.numel, "density": density, "ranks": ranks}
                row |= {"dense": round(dense), "gather": gathered, "auto": owners}
                row |= {"buckets": len(layout.buckets), "buckets with owners": dealt}
                row |= {"ok-topk": round(24 * k * (ranks - 1) / ranks), "bound": 8 * k}
                rows.append(row)
                print(
                    f"{model:12} {density:8.3%} {ranks:5} dense {dense / 1e6:8.1f} MB  gather {gathered / 1e6:8.2f} "
                    f"({dense / gathered:6.1f}x)  owners {owners / 1e6:7.2f} ({dense / owners:6.1f}x, {dealt} of "
                    f"{len(layout.buckets)} buckets)  Ok-Topk {row['ok-topk'] / 1e6:7.2f}  2k {row['bound'] / 1e6:7.2f}"
                )
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
