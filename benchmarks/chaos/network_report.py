"""Results of the jobs between hosts as the table of benchmarks/chaos/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from network_faults import NETWORK_FAULTS
from report import LAUNCHERS, ROOT, read_rows, replace, shown

RESULTS = ROOT / "benchmarks" / "results" / "chaos-network.json"
BEGIN = "<!-- written by benchmarks/chaos/network_matrix.py --markdown -->\n"
WAYS = ("A", "B", "dense")


def write_docs(path: Path) -> None:
    """Replace the table of benchmarks/chaos/README.md by that of the results in ``path``."""
    rows = read_rows(path)
    columns = [(way, launcher) for launcher in LAUNCHERS for way in WAYS]
    titles = {"A": "Horovod's optimizer", "B": "dgc's", "dense": "dense"}
    heads = [f"{titles[way]}, {LAUNCHERS[launcher]}" for way, launcher in columns]
    lines = [f"| fault | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for name, fault in NETWORK_FAULTS.items():
        found = [rows.get((*column, name)) for column in columns]
        if any(found):
            lines.append(f"| {fault.what} | {' | '.join(map(_cell, found))} |")
    replace(BEGIN, "\n".join(lines) + "\n")


def _cell(row: dict[str, Any] | None) -> str:
    text = shown(row)
    if row is not None and row["verdict"] == "HANGS" and "StallError" in row["reads"]:
        text = "rank 0 ends with a `StallError`, the launcher **HANGS**"
    if row is None or row["resumed"] is None:
        return text
    ends = {True: "", False: ", **WRONG**"}.get(row.get("same", ""), ", not compared")
    return f"{text}; resumes after step {row['resumed']}{ends}"
