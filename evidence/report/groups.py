"""Results by application and variant, and what is made of several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.application import EvidenceError, Metric
from evidence.applications import CLASSES
from evidence.variants import VARIANTS

WANTED_RATIO = 270
CLOSE = 0.005
"""A relative difference that counts as none."""


@dataclass(frozen=True)
class Group:
    """One variant of one application, with all seeds that there are."""

    application: str
    variant: str
    runs: tuple[Mapping[str, Any], ...]

    @property
    def seeds(self) -> list[int]:
        """In ascending order."""
        return [run["seed"] for run in self.runs]

    def finals(self, metric: str) -> list[float]:
        """A metric after the last epoch, by seed."""
        return [run["final"][metric] for run in self.runs]

    def mean(self, metric: str) -> float:
        """Of the seeds."""
        values = self.finals(metric)
        return sum(values) / len(values)

    def deviation(self, metric: str) -> float | None:
        """Standard deviation of the seeds (n - 1); None of one."""
        values = self.finals(metric)
        if len(values) < 2:
            return None
        mean = self.mean(metric)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

    def epochs_after(self, run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """A run's epochs after the warm-up; all, where there was none."""
        if not VARIANTS[self.variant].rampup:
            return list(run["curve"])
        return [epoch for epoch in run["curve"] if epoch["epoch"] > run["rampup_epochs"]]

    def bytes_per_step(self) -> float:
        """What one rank sends in a step after the warm-up."""
        epochs = [epoch for run in self.runs for epoch in self.epochs_after(run)]
        return sum(e["bytes"] for e in epochs) / max(1, sum(e["steps"] for e in epochs))

    def bytes_total(self) -> float:
        """What one rank sends in a whole training, warm-up included."""
        return sum(epoch["bytes"] for run in self.runs for epoch in run["curve"]) / len(self.runs)

    def ratio(self) -> float:
        """How many times fewer bytes than dense in everything that was sent after the warm-up."""
        return self.runs[0]["dense_bytes_per_step"] / self.bytes_per_step()

    def ratio_of_all(self) -> float:
        """The same of the whole training."""
        steps = sum(epoch["steps"] for epoch in self.runs[0]["curve"])
        return self.runs[0]["dense_bytes_per_step"] * steps / self.bytes_total()

    def seconds(self) -> float:
        """Mean duration of a training."""
        return sum(run["seconds"] for run in self.runs) / len(self.runs)

    def curve(self, metric: str) -> tuple[list[int], list[float], list[float], list[float]]:
        """Epochs; mean, smallest and largest value over the seeds."""
        shortest = min(len(run["curve"]) for run in self.runs)
        values = [[run["curve"][i]["metrics"][metric] for run in self.runs] for i in range(shortest)]
        epochs = [self.runs[0]["curve"][i]["epoch"] for i in range(shortest)]
        return epochs, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


Groups = dict[tuple[str, str], Group]


def load_groups(folder: Path) -> Groups:
    """All results of a folder.

    Raises:
        EvidenceError: one is damaged, or runs of one application were made in different ways.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            run = json.loads(path.read_text())
            key = (run["application"], run["variant"])
        except (ValueError, KeyError, TypeError):
            raise EvidenceError(f"{path} is no result of a training; delete it, and call again") from None
        if key[0] in CLASSES and key[1] in VARIANTS:
            found.setdefault(key, []).append(run)
    for application in CLASSES:
        own = [run for key, runs in found.items() if key[0] == application for run in runs]
        for name in ("scale", "ranks", "epochs", "facts", "parameters"):
            if len({json.dumps(run[name], sort_keys=True) for run in own}) > 1:
                raise EvidenceError(
                    f"{folder}: the trainings of {application!r} were made with different {name}; delete those that no "
                    "longer count, and call again"
                )
    order = {key: sorted(runs, key=lambda run: run["seed"]) for key, runs in found.items()}
    return {
        (application, variant): Group(application, variant, tuple(order[application, variant]))
        for application in CLASSES
        for variant in VARIANTS
        if (application, variant) in order
    }


@dataclass(frozen=True)
class Verdict:
    """DGC beside dense."""

    worse: float
    """By how much of dense's mean DGC's is worse; negative: better."""
    deviations: float | None
    """The same in standard deviations of dense; None where there is no spread."""
    ratio: float

    @property
    def is_close(self) -> bool:
        """Whether the metric is as good as dense: within one standard deviation, or :data:`CLOSE`, or better."""
        return self.worse <= CLOSE or (self.deviations is not None and self.deviations <= 1)

    @property
    def is_reached(self) -> bool:
        """Whether both the metric and the ratio are as wanted."""
        return self.is_close and self.ratio >= WANTED_RATIO


def verdict(dense: Group, other: Group, metric: Metric) -> Verdict:
    """Compare two variants by one metric."""
    sign = 1 if metric.better == "lower" else -1
    difference = sign * (other.mean(metric.name) - dense.mean(metric.name))
    deviation = dense.deviation(metric.name)
    base = abs(dense.mean(metric.name))
    return Verdict(
        difference / base if base else (math.inf if difference > 0 else 0.0),
        difference / deviation if deviation else None,
        other.ratio(),
    )


def metric_texts(values: Sequence[float | None], metric: Metric) -> list[str]:
    """Numbers as the page writes them, with the decimals that suit the first; "" for None."""
    factor, unit = (100, " %") if metric.percent else (1, "")
    first = abs(factor * (values[0] or 0.0))
    decimals = 2 if metric.percent else 4 if first < 1 else 2 if first < 1000 else 0
    return ["" if value is None else f"{factor * value:,.{decimals}f}{unit}" for value in values]
