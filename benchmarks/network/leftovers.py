"""The folders of labs, and what to do about labs whose process was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from network import processes

PREFIX = "dgc-lab-"
OWNER = "owner"


def make_folder() -> Path:
    """A new lab's folder, which says whose it is."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    (folder / OWNER).write_text(f"{os.getpid()} {processes.started(os.getpid())}")
    return folder


def in_use(folder: Path) -> bool:
    """Whether the process that made a lab still lives."""
    try:
        pid, then = (folder / OWNER).read_text().split()
    except (OSError, ValueError):
        return False
    return processes.started(int(pid)) == then


def remove(folder: Path) -> int:
    """End what a lab left running, with which its network goes, and remove its folder; returns how many processes."""
    total = 0
    # What is killed may have just started something.
    for _ in range(10):
        left = processes.of_lab(str(folder))
        if not left:
            break
        total += len(left)
        processes.kill(left)
    shutil.rmtree(folder, ignore_errors=True)
    return total


def clean_up() -> list[str]:
    """Remove every lab of this machine whose process is gone; says what was done, a line each."""
    lines = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if in_use(folder):
            lines.append(f"{folder}: in use by process {(folder / OWNER).read_text().split()[0]}, left alone")
        else:
            lines.append(f"{folder}: removed, {remove(folder)} processes ended")
    return lines or ["nothing was left"]
