"""Where processes hang, in C and Python, as far as py-spy or gdb are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable

import psutil

SECONDS = 60.0
"""A debugger that takes longer is ended: it may wait for the very process that it looks at."""
LONGEST = 12_000


def stacks_of(processes: Iterable[psutil.Process]) -> str:
    """The stacks of all threads; empty where nothing is installed that shows them."""
    return "".join(f"==== {process.pid}\n{_stacks(process.pid)}\n" for process in processes if _debugger(process.pid))


def _debugger(pid: int) -> list[str] | None:
    if shutil.which("py-spy") is not None:
        return ["py-spy", "dump", "--native", "--pid", str(pid)]
    if shutil.which("gdb") is not None:
        return ["gdb", "-batch", "-ex", "thread apply all bt 14", "-p", str(pid)]
    return None


def _stacks(pid: int) -> str:
    command = _debugger(pid)
    if command is None:
        return ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        return f"{said[-LONGEST:]}\n{command[0]} gave no answer within {SECONDS:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error}"
    return done.stdout.decode(errors="replace")[-LONGEST:]
