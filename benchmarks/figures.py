"""Draw the figures of README and of the results from benchmarks/results: ``make figures``.

docs/step-time.svg: the seconds of a GPT's step on two networks, by method, of adaptive-gpt-10m-steps.json.
benchmarks/results/adamw.svg: a GPT's loss in the course of the training, by method, of adaptive-gpt-10m.json.
"""

from __future__ import annotations

import json
import statistics
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

METHODS = {
    "dense": ("dense DDP", "C3"),
    "fp16": ("16 bits", "C1"),
    "powersgd=4": ("PowerSGD, rank 4", "C4"),
    "steps": ("dgc, steps=, classic", "C9"),
    "ahead": ("dgc, steps=", "C0"),
}
"""Of the benchmark's settings: label, colour."""
RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
"""Of the links: the benchmark's name."""

TRAININGS = {
    "dense": ("dense", "C3", "o-"),
    "steps,values=int2": ("DGC, steps=", "C0", "D-"),
    "powersgd=4": ("PowerSGD, rank 4", "C4", "^-"),
}
"""Of the trainings with AdamW: label, colour, style."""


def step_time() -> Path:
    """Draw the seconds of a step of a GPT with AdamW, medians of the runs."""
    found = json.loads((RESULTS / "adaptive-gpt-10m-steps.json").read_text())
    figure, axes = plt.subplots(figsize=SIZE)
    labels = []
    for at, (name, rate) in enumerate(RATES.items()):
        for place, (method, (label, color)) in enumerate(METHODS.items()):
            y = at * (len(METHODS) + 1) + place
            runs = [row["step"] for row in found["rows"] if (row["setting"], row["rate"]) == (method, rate)]
            seconds = statistics.median(runs)
            axes.barh(y, seconds, color=color)
            axes.text(seconds + 0.05, y, f"{seconds:.2f} s", va="center", fontsize=9)
            labels.append((y, label))
        axes.text(3.4, at * (len(METHODS) + 1) + 3, name, fontsize=11, weight="bold")
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step", xlim=(0, 5))
    axes.set_title(f"A step of a GPT of 10.8 million parameters with AdamW, {found['ranks']} hosts", fontsize=9)
    return saved(figure, axes, DOCS / "step-time.svg")


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
    return saved(figure, axes, RESULTS / "adamw.svg")


def saved(figure: Any, axes: Any, path: Path) -> Path:
    """Write a figure."""
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata=METADATA)
    return path


if __name__ == "__main__":
    with plt.rc_context({"svg.hashsalt": "dgc", "svg.fonttype": "none", "font.size": 10}):
        print(step_time(), adamw(), sep="\n")
