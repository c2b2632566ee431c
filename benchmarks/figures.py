"""Draw the figures of docs/ from benchmarks/results: ``make figures``.

docs/step-time.svg: step time against bandwidth, by method, of powersgd.json.
docs/adamw.svg: a GPT's loss in the course of the training, by method, of adaptive-gpt-10m.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
METADATA = {"Date": None, "Creator": None}
"""With these, and a fixed salt, the same results give the same file."""
SIZE = (5, 3.6)  # inches: on a phone, the letters are then as large as those of the text

LINES = {
    "dense": ("dense DDP", "C3", "o-"),
    "fp16": ("DDP's hook for 16 bits", "C1", "s-"),
    "powersgd-1": ("DDP's PowerSGD hook, rank 1", "C4", "^-"),
    "dgc-hook": ("DDP with dgc's hook, 0.1 %", "C0", "D--"),
    "dgc": ("dgc's optimizer, 0.1 %", "C0", "D-"),
}
"""Of the benchmark's methods: label, colour, style."""
RATES = {"100mbit": 100, "1gbit": 1000, "10gbit": 10_000}
"""Of the links, in Mbit/s."""

TRAININGS = {
    "dense": ("dense", "C3", "o-"),
    "steps,values=int2": ("DGC, steps=", "C0", "D-"),
    "powersgd=4": ("PowerSGD, rank 4", "C4", "^-"),
}
"""Of the trainings with AdamW: label, colour, style."""


def step_time() -> Path:
    """Draw step times."""
    found = json.loads((RESULTS / "powersgd.json").read_text())
    seconds = {(row["method"], row["rate"]): row["seconds"] for row in found["rows"] if row["model"] == "mlp"}
    figure, axes = plt.subplots(figsize=SIZE)
    for method, (label, color, style) in LINES.items():
        times = [1000 * seconds[method, rate] for rate in RATES]
        axes.plot(list(RATES.values()), times, style, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel="speed of the network, Mbit/s", ylabel="a training step, ms")
    ticks = [50, 100, 200, 500, 1000, 2000, 5000, 10_000]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks(list(RATES.values()), [f"{rate:,}" for rate in RATES.values()])
    axes.minorticks_off()
    axes.set_title(f"A training step of 23 million parameters (MLP) on {found['ranks']} hosts", fontsize=10)
    axes.legend(fontsize=9, ncol=2, loc="upper center", bbox_to_anchor=(0.45, -0.24))
    return saved(figure, axes, "step-time.svg")


def adamw() -> Path:
    """Draw the loss of a GPT."""
    found = json.loads((RESULTS / "adaptive-gpt-10m.json").read_text())
    figure, axes = plt.subplots(figsize=SIZE)
    for row in (row for row in found["rows"] if row["steps"] == 2000):
        label, color, style = TRAININGS[row["setting"]]
        fewer = f", {row['fewer']:.0f} times fewer bytes" if row["fewer"] > 1 else ""
        axes.plot(*zip(*row["curve"], strict=True), style, color=color, label=label + fewer)
    axes.set(xlabel="step", ylabel="loss of held-out text, nats a byte")
    parameters = found["rows"][0]["parameters"] / 1e6
    axes.set_title(f"A GPT of {parameters:.0f} million parameters with AdamW on {found['ranks']} ranks", fontsize=10)
    axes.legend(fontsize=9)
    return saved(figure, axes, "adamw.svg")


def saved(figure: Any, axes: Any, name: str) -> Path:
    """Write a figure into the documentation."""
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata=METADATA)
    return DOCS / name


if __name__ == "__main__":
    with plt.rc_context({"svg.hashsalt": "dgc", "svg.fonttype": "none", "font.size": 10}):
        print(step_time(), adamw(), sep="\n")
