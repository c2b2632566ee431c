"""Draw docs/step-time.svg from benchmarks/results/end-to-end-bandwidth.json: step time against bandwidth, by method.

make figures
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "end-to-end-bandwidth.json"
FIGURE = ROOT / "docs" / "step-time.svg"

LINES = {
    "dense": ("dense float32", "C3", "o-"),
    "fp16": ("16 bits", "C1", "s-"),
    "powersgd": ("PowerSGD, rank 1", "C4", "^-"),
    "dgc-b": ("DGC, 0.1 %", "C0", "D-"),
    "none": ("no exchange", "0.5", "--"),
}
"""Of the benchmark's methods: label, colour, style."""


def main() -> None:
    """Write the figure; the same results give the same file."""
    rows = json.loads(RESULTS.read_text())["rows"]
    with plt.rc_context({"svg.hashsalt": "dgc", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = plt.subplots(figsize=(7, 3.8))
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
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
        figure.tight_layout()
        figure.savefig(FIGURE, metadata={"Date": None, "Creator": None})
    print(FIGURE)


if __name__ == "__main__":
    main()
