"""Processes as /proc shows them: who is alive, whose child, which of them belong to a lab."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "DGC_LAB"
"""Every process of a lab has this variable: the lab's folder."""


def _fields(pid: int) -> list[str]:
    """What stands in ``stat`` after the process's name: state, parent, ...; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def started(pid: int) -> str | None:
    """When a living process was started, in clock ticks since boot: tells it from a later one of the same number."""
    fields = _fields(pid)
    return None if not fields or fields[0] in "ZX" else fields[19]


def everybody() -> list[int]:
    """All processes."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [other for other in everybody() if (_fields(other) or ["", "-1"])[1] == str(pid)]


def of_lab(folder: str) -> list[int]:
    """The processes of the lab that lives in ``folder``, apart from this one."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for pid in everybody():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in variables and pid != os.getpid() and started(pid):
            found.append(pid)
    return found


def kill(pids: Iterable[int], seconds: float = 5.0) -> None:
    """Kill processes and wait until they are gone."""
    alive = {pid: started(pid) for pid in pids}
    for pid in alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(then and started(pid) == then for pid, then in alive.items()):
        time.sleep(0.01)
