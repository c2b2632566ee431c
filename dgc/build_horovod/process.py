"""Run the long commands of the build, and say what happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HEARTBEAT_SECONDS = 15
LOG_TAIL_LINES = 40


class BuildError(Exception):
    """The build cannot start or has failed; the message says why and what to do."""


def say(text: str) -> None:
    """Report progress on stderr: stdout is for the wheel's path."""
    print(text, file=sys.stderr, flush=True)


def run_logged(what: str, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in `log`, showing the elapsed time and the last line at intervals.

    Raises:
        BuildError: the command failed; holds the last lines of the log and the first error in it.
    """
    say(f"{what} (log: {log})")
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        # A session of its own, so that an interruption ends the compilers too and not only pip.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {format_seconds(time.monotonic() - begin)}  {latest_progress(log)}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line[:400]}" for line in lines[-LOG_TAIL_LINES:])
        raise BuildError(
            f"{what} failed after {format_seconds(time.monotonic() - begin)} (exit status {code}).\n"
            f"Last lines of the log:\n{tail}\nReason: {failure_reason(lines)}\nFull log: {log}"
        )
    say(f"  done in {format_seconds(time.monotonic() - begin)}")


def format_seconds(seconds: float) -> str:
    """Return `3m07s`."""
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def latest_progress(log: Path) -> str:
    """Return the newest line of a log that tells something: a step of make, or else the last line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if re.match(r"\[ *\d+%\]", line)]
    return (steps or lines or ["(no output yet)"])[-1][:110]


def failure_reason(lines: list[str]) -> str:
    """Return the first line of a log that names an error, with a hint when it is a known one."""
    text = "\n".join(lines)
    if re.search(r"Killed signal|signal 9|Cannot allocate memory|virtual memory exhausted", text):
        return "the compiler ran out of memory: run again with --jobs 1"
    if "No space left on device" in text:
        return "the disk is full: free about 2 GB, or set TMPDIR to a directory on a larger disk"
    if "Could not find a version that satisfies" in text:
        return "pip found no such download: check the connection, or give a downloaded file with --sdist"
    errors = re.compile(r"(fatal error|error:|CMake Error|ERROR:|\*\*\* )")
    return next((line.strip()[:400] for line in lines if errors.search(line)), "see the log")
