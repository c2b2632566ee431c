"""Learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence.application import EvidenceError, Metric
from evidence.report.groups import Group
from evidence.variants import VARIANTS


def plot_curves(groups: Sequence[Group], metric: Metric, path: Path) -> None:
    """Draw a metric over the epochs: for each group the mean of its seeds, and from the worst to the best.

    Args:
        groups: one line each.
        metric: which.
        path: of the SVG to write.

    Raises:
        EvidenceError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise EvidenceError("matplotlib is missing, which draws the curves: pip install matplotlib") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same results give the same file; text stays text.
    with plt.rc_context({"svg.hashsalt": "dgc", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7, 4))
        _draw(axes, groups, metric)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _draw(axes: Any, groups: Sequence[Group], metric: Metric) -> None:
    factor = 100 if metric.percent else 1
    ends = []
    for group in groups:
        epochs, means, lowest, highest = group.curve(metric.name)
        (line,) = axes.plot(epochs, [factor * v for v in means], "o-", markersize=3, label=VARIANTS[group.variant].text)
        low, high = [factor * v for v in lowest], [factor * v for v in highest]
        axes.fill_between(epochs, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        ends += [factor * v for v in means[len(means) // 4 :]]
    axes.set(xlabel="epoch", ylabel=f"{metric.name}{', %' if metric.percent else ''}")
    # The first epochs are far from where the curves part.
    finite = [v for v in ends if abs(v) < 1e6]
    if finite and min(finite) < max(finite):
        margin = 0.1 * (max(finite) - min(finite))
        axes.set_ylim(min(finite) - margin, max(finite) + margin)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
