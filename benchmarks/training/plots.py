"""Step time against the links' speed, and against the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from network.links import bits_per_second


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """One figure a model and question, where there is more than one point on its axis; returns the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dgc"
    written = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        for axis, other in (("rate", "ranks"), ("ranks", "rate")):
            for fixed in dict.fromkeys(row[other] for row in own):
                chosen = [row for row in own if row[other] == fixed and _place(row[axis])]
                if len({row[axis] for row in chosen}) > 1:
                    written.append(_figure(chosen, axis, f"{model}, {fixed}{' ranks' * (other == 'ranks')}", folder))
    return written


def _place(value: str | int) -> float | None:
    """Where a point lies on its axis: Mbit/s, or ranks; None for a link without a limit."""
    if isinstance(value, int):
        return value
    bits = bits_per_second(value)
    return bits / 1e6 if bits else None


def _figure(rows: list[dict[str, Any]], axis: str, title: str, folder: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted((_place(row[axis]), 1e3 * row["seconds"]) for row in rows if row["method"] == method)
        axes.plot(*zip(*points, strict=True), "o-", label=method)
    axes.set(title=title, ylabel="step, ms (median)", yscale="log")
    axes.set(**({"xscale": "log", "xlabel": "link, Mbit/s"} if axis == "rate" else {"xlabel": "ranks"}))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path = folder / f"end-to-end-{title.replace(', ', '-').replace(' ', '-')}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
