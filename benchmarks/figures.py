"""Draw the figures of docs/ from benchmarks/results: ``make figures``.

docs/step-time.svg: step time against bandwidth, by method, of end-to-end-bandwidth.json.
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
    "dense": ("dense float32", "C3", "o-"),
    "fp16": ("16 bits", "C1", "s-"),
    "powersgd": ("PowerSGD, rank 1", "C4", "^-"),
    "dgc-b": ("DGC, 0.1 %", "C0", "D-"),
    "none": ("no exchange", "0.5", "--"),
}
"""Of the benchmark's methods: label, colour, style."""


TRAININGS = {
    "dense": ("dense", "C3", "o-"),
    "steps": ("DGC, steps=", "C0", "D-"),
    "powersgd=4": ("PowerSGD, rank 4", "C4", "^-"),
}
"""Of the trainings with AdamW: label, colour, style."""


def step_time() -> Path:
    """Draw step times."""
    rows = json.loads((RESULTS / "end-to-end-bandwidth.json").read_text())["rows"]
    figure, axes = plt.subplots(figsize=SIZE)
    for method, (label, color, style) in LINES.items():
        points = sorted((row["carried"] / 1e6, row["ratio_to_none"]) for row in rows if row["method"] == method)
        rates, ratios = [rate for rate, _ in points], [ratio for _, ratio in points]
        axes.plot(rates, [ratio[0] for ratio in ratios], style, color=color, label=label)
        axes.fill_between(rates, [r[1] for r in ratios], [r[2] for r in ratios], color=color, alpha=0.15, lw=0)
    axes.set(xscale="log", yscale="log", xlabel="what the link carries, Mbit/s", ylabel="step time / no exchange")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    rates = sorted({round(row["carried"] / 1e6) for row in rows})
    axes.set_xticks(rates, [f"{rate:,}" for rate in rates])
    parameters, ranks = rows[0]["parameters"] / 1e6, rows[0]["ranks"]
    axes.set_title(f"A training step of {parameters:.0f} million parameters (MLP) on {ranks} hosts", fontsize=10)
    return saved(figure, axes, "step-time.svg")


def adamw() -> Path:
    """Draw the loss of a GPT."""
    found = json.loads((RESULTS / "adaptive-gpt-10m.json").read_text())
    figure, axes = plt.subplots(figsize=SIZE)
    for row in found["rows"]:
        label, color, style = TRAININGS[row["setting"]]
        fewer = f", {row['fewer']:.0f} times fewer bytes" if row["fewer"] > 1 else ""
        axes.plot(*zip(*row["curve"], strict=True), style, color=color, label=label + fewer)
    axes.set(xlabel="step", ylabel="loss of held-out text, nats a byte")
    parameters = found["rows"][0]["parameters"] / 1e6
    axes.set_title(f"A GPT of {parameters:.0f} million parameters with AdamW on {found['ranks']} ranks", fontsize=10)
    return saved(figure, axes, "adamw.svg")


def saved(figure: Any, axes: Any, name: str) -> Path:
    """Write a figure into the documentation."""
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata=METADATA)
    return DOCS / name


if __name__ == "__main__":
    with plt.rc_context({"svg.hashsalt": "dgc", "svg.fonttype": "none", "font.size": 10}):
        print(step_time(), adamw(), sep="\n")
