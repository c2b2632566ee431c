"""Medians over steps, ratios over pairs, means over ranks; as rows for JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

PARTS = ("zero_grad", "forward", "backward", "step")
YARDSTICKS = ("none", "dense")
PHASES = ("compress", "exchange", "apply")


def mean(values: Iterable[float]) -> float:
    """Over the ranks."""
    return statistics.fmean(values)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each key."""
    keys = {key for row in rows for key in row}
    return {key: statistics.median(row.get(key, 0.0) for row in rows) for key in sorted(keys)}


def summarise(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a method, from what each rank found: ``{method: {"steps": [...], "blocks": [...]}}``."""
    return [_method(method, ranks) for method in ranks[0]]


def _method(method: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [rank[method]["steps"] for rank in ranks]
    row: dict[str, Any] = {
        "method": method,
        "steps": len(steps[0]),
        "seconds": mean(statistics.median(sum(s[part] for part in PARTS) for s in own) for own in steps),
        "parts": {part: mean(statistics.median(s[part] for s in own) for own in steps) for part in PARTS},
    }
    for group in ("bytes", "cpu", "kernel", "memory"):
        by_rank = [medians([block[group] for block in rank[method]["blocks"]]) for rank in ranks]
        keys = sorted({key for found in by_rank for key in found})
        row[group] = {key: mean(found.get(key, 0.0) for found in by_rank) for key in keys}
    for yardstick in YARDSTICKS:
        if yardstick in ranks[0]:
            pairs = [_ratio(method, yardstick, number, ranks) for number in range(len(ranks[0][method]["blocks"]))]
            row[f"ratio_to_{yardstick}"] = [statistics.median(pairs), min(pairs), max(pairs)]
    if "phases" in steps[0][0]:
        row["phases"] = _over_ranks([medians([s["phases"] for s in own]) for own in steps])
        row["density"] = mean(own[-1]["density"] for own in steps)
        row["handed_over"] = mean(statistics.median(s["handed_over"] for s in own) for own in steps)
        # What the communication thread did while the main thread did not wait for it. Waiting is longer than the phases
        # where the threads wait for a core.
        exposed = row["phases"].get("wait", 0.0)
        row["exposed"] = exposed
        row["hidden"] = max(0.0, sum(row["phases"].get(p, 0.0) for p in PHASES) - exposed)
    return row


def _over_ranks(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: mean(f[key] for f in found) for key in found[0]}


def _ratio(method: str, yardstick: str, number: int, ranks: list[dict[str, Any]]) -> float:
    """Of the blocks of one round: the same moment of the machine."""
    of, to = (mean(rank[name]["blocks"][number]["seconds"] for rank in ranks) for name in (method, yardstick))
    return of / to


HEAD = (
    "| method | step, ms | zero_grad | forward | backward | step() | x none (spread) | x dense (spread) "
    "| MB sent a step | CPU, ms: main | Horovod | ours | other | page faults | switches, own / forced "
    "| compress / exchange / apply, ms | of it hidden / exposed | peak memory, MB |"
)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a table for each model, rate and number of ranks."""
    lines: list[str] = []
    before = None
    for row in rows:
        where = f"{row['model']}, {row['ranks']} ranks, {row['rate']}"
        if where != before:
            rule = "|---" * (HEAD.count("|") - 1) + "|"
            lines += ["", f"{where} ({row['parameters'] / 1e6:.1f} million parameters)", "", HEAD, rule]
        before = where
        lines.append(_line(row))
    return "\n".join(lines[1:])


def _line(row: dict[str, Any]) -> str:
    cpu = dict(row["cpu"])
    known = [cpu.pop(name, 0.0) for name in ("main", "horovod", "dgc-exchange")]
    kernel = row["kernel"]
    cells = [
        row["method"],
        f"{1e3 * row['seconds']:.1f}",
        *(f"{1e3 * row['parts'][part]:.1f}" for part in PARTS),
        *(_spread(row.get(f"ratio_to_{yardstick}")) for yardstick in YARDSTICKS),
        f"{sent(row) / 1e6:.3f}",
        *(f"{1e3 * seconds:.1f}" for seconds in (*known, sum(cpu.values()))),
        f"{kernel['page_faults']:.0f}",
        f"{kernel['switches_voluntary']:.0f} / {kernel['switches_involuntary']:.0f}",
        *_phases(row),
        f"{row['memory']['peak'] / 1e6:.0f}" if row.get("memory") else "",
    ]
    return f"| {' | '.join(cells)} |"


def _phases(row: dict[str, Any]) -> tuple[str, str]:
    """What the communication thread did by the clock, and how long the main thread waited for it."""
    if "phases" not in row:
        return "", ""
    spent = " / ".join(f"{1e3 * row['phases'].get(phase, 0.0):.1f}" for phase in PHASES)
    return spent, f"{1e3 * row['hidden']:.1f} / {1e3 * row['exposed']:.1f}"


def sent(row: dict[str, Any]) -> float:
    """Bytes a step that left a rank by its interface; without a lab its ranks share the loopback's."""
    return row["bytes"].get("eth0_sent", 0.0)


def _spread(ratio: list[float] | None) -> str:
    return "" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
