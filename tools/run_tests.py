#!/usr/bin/env python3
"""Run the whole suite as two pytest runs side by side: tests within one process, and tests that start ranks.

The first leaves a core to the second most of the time, since ranks wait for each other. What the second prints is shown
as it comes, what the first prints follows as a whole. The exit status is that of the first run that failed. Arguments
are handed on to both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

WITHOUT_RANKS = ("adapter", "build_horovod", "contract", "core", "distribution")
"""Folders of ``tests/`` whose tests start no ranks; all others are the second run's, those not yet thought of too."""

NO_TESTS = 5
"""Pytest's status when nothing was selected, as ``-k`` may do to one of two runs."""


def folders() -> tuple[list[str], list[str]]:
    """Paths of the folders with tests: those that start no ranks, and the others."""
    tests = REPOSITORY / "tests"
    names = sorted(path.name for path in tests.iterdir() if any(path.glob("**/test_*.py")))
    first = [name for name in names if name in WITHOUT_RANKS]
    rest = [name for name in names if name not in WITHOUT_RANKS]
    return [f"tests/{name}" for name in first], [f"tests/{name}" for name in rest]


def command(paths: list[str], name: str, arguments: list[str]) -> list[str]:
    # A folder for each: what failed last is kept there.
    return [sys.executable, "-m", "pytest", *paths, "-o", f"cache_dir=.pytest_cache/{name}", *arguments]


def main() -> int:
    arguments = sys.argv[1:]
    within, ranks = folders()
    compiling = [sys.executable, str(REPOSITORY / "tools" / "compile_kernels.py")]
    subprocess.run(compiling, cwd=REPOSITORY, check=False)
    with tempfile.TemporaryFile() as log:
        one = subprocess.Popen(
            command(within, "within", arguments), cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            two = subprocess.run(command(ranks, "ranks", arguments), cwd=REPOSITORY, check=False).returncode
            first = one.wait()
        except BaseException:
            one.terminate()
            one.wait()
            raise
        finally:
            sys.stdout.flush()
            log.seek(0)
            sys.stdout.buffer.write(log.read())
            sys.stdout.flush()
    statuses = [status for status in (two, first) if status != NO_TESTS]
    return next((status for status in statuses if status), 0) if statuses else NO_TESTS


if __name__ == "__main__":
    sys.exit(main())
