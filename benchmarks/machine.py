"""Describe the machine on which a benchmark runs, and write what it found."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Return the processor's name and the number of its cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def facts(*packages: str) -> dict[str, Any]:
    """The machine, how busy it is, and the versions of Python and of ``packages``."""
    return {
        "machine": processor(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def one_item_a_line(content: dict[str, Any]) -> str:
    """Return JSON with a line for each value, and for each item of a list, such as a row of a table."""
    lines = []
    for key, value in content.items():
        items = isinstance(value, list) and "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(key)}: {items or json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
