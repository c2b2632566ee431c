"""The page's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evidence.application import Metric
from evidence.report.groups import Group, Groups, metric_texts, verdict
from evidence.variants import VARIANTS


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(group: Group, metric: Metric) -> str:
    """Mean and standard deviation: "98.52 % ± 0.11"."""
    mean, deviation = metric_texts([group.mean(metric.name), group.deviation(metric.name)], metric)
    return f"{mean} ± {deviation.removesuffix(' %')}" if deviation else mean


def relative(worse: float) -> str:
    """How much better or worse than something else."""
    return f"{100 * abs(worse):.2f} % {'worse' if worse > 0 else 'better'}" if abs(worse) >= 5e-5 else "equal"


def summary(groups: Groups, titles: dict[str, str], metrics: dict[str, Metric]) -> str:
    """DGC beside dense, one row an application."""
    rows = []
    for application, title in titles.items():
        dense, dgc = groups.get((application, "dense")), groups.get((application, "dgc"))
        if dense is None or dgc is None:
            continue
        metric = metrics[application]
        found = verdict(dense, dgc, metric)
        deviations = "" if found.deviations is None else f", {found.deviations:+.1f} sd"
        rows.append(
            [
                title,
                metric.name,
                spread(dense, metric),
                spread(dgc, metric),
                relative(found.worse) + deviations,
                f"{found.ratio:.0f}x",
                f"{dgc.ratio_of_all():.0f}x",
                "yes" if found.is_reached else "no",
            ]
        )
    head = ["application", "metric", "dense", "DGC, 99.9 %", "DGC beside dense", "fewer bytes", "whole run", "reached"]
    return table(head, rows)


def variants(groups: Sequence[Group], base: Group, metric: Metric) -> str:
    """Variants of one application beside one of them."""
    rows = []
    for group in groups:
        beside = "" if group is base else relative(verdict(base, group, metric).worse)
        rows.append(
            [
                VARIANTS[group.variant].text,
                spread(group, metric),
                beside,
                f"{group.bytes_per_step():,.0f}",
                f"{group.ratio():.0f}x" if group.ratio() >= 10 else f"{group.ratio():.1f}x",
                ", ".join(metric_texts(group.finals(metric.name), metric)),
            ]
        )
    base_name = VARIANTS[base.variant].text
    return table(["", metric.name, f"beside {base_name}", "bytes a step and rank", "fewer than dense", "by seed"], rows)


def durations(groups: Groups, titles: dict[str, str]) -> str:
    """What the trainings took, and on how many ranks."""
    rows = []
    for application, title in titles.items():
        own = [group for (name, _), group in groups.items() if name == application]
        if not own:
            continue
        first = own[0].runs[0]
        steps = sum(epoch["steps"] for epoch in first["curve"])
        seeds_run = sorted({seed for group in own for seed in group.seeds})
        rows.append(
            [
                title,
                str(first["ranks"]),
                ", ".join(map(str, seeds_run)),
                str(sum(len(group.runs) for group in own)),
                f"{first['epochs']}, {steps:,}",
                f"{first['parameters']:,}",
                "; ".join(f"{group.variant} {group.seconds():.0f}" for group in own),
            ]
        )
    head = ["application", "ranks", "seeds", "trainings", "epochs, steps", "parameters", "seconds of a training"]
    return table(head, rows)
