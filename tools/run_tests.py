#!/usr/bin/env python3
"""Run the tests as pytest runs side by side: tests within one process, those of each framework, and the rest.

    tools/run_tests.py            every behaviour once: all but the tests marked ``matrix``
    tools/run_tests.py --all      the matrix too: other numbers of ranks, launchers and versions of Keras, more seeds
    tools/run_tests.py --beyond   the matrix alone
    tools/run_tests.py --quick    the core and what compressors promise, which start no ranks; as without an option

Ranks wait for each other, and frameworks are imported for seconds on one core: beside each other the runs keep all
cores busy. Each run's output comes as a whole when it has ended. The exit status is that of the first run that failed.
Other arguments are handed on to all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent

RUNS = {
    "tensorflow": ("adapters_tensorflow",),
    "torch": ("adapters_torch",),
    "within": ("adapter", "contract", "core", "distribution"),
}
"""Folders of ``tests/`` by run; all others are one more run's, those not yet thought of too."""

QUICK = {"kernels": ("core/kernels",), "rest of the core": ("core", "contract")}
"""The same for ``--quick``; a run leaves out what an earlier one has."""

SELECTIONS = {"--quick": "not matrix", "--once": "not matrix", "--beyond": "matrix", "--all": ""}
"""What is run of the folders, as an expression of pytest's markers; ``--once`` is meant where none is named."""

NO_TESTS = 5
"""Pytest's status when nothing was selected, as ``-k`` may do to some of the runs."""


def folders() -> dict[str, list[str]]:
    """Paths of the folders with tests, by run."""
    tests = REPOSITORY / "tests"
    names = sorted(path.name for path in tests.iterdir() if any(path.glob("**/test_*.py")))
    taken = {name for members in RUNS.values() for name in members}
    runs = {**RUNS, "others": tuple(name for name in names if name not in taken)}
    return {run: [f"tests/{name}" for name in members if name in names] for run, members in runs.items()}


def quick_folders() -> dict[str, list[str]]:
    """As :func:`folders`, of :data:`QUICK`."""
    runs: dict[str, list[str]] = {}
    for run, members in QUICK.items():
        before = [f"--ignore={path}" for paths in runs.values() for path in paths]
        runs[run] = [f"tests/{name}" for name in members] + before
    return runs


def command(paths: list[str], name: str, arguments: list[str]) -> list[str]:
    # A folder for each: what failed last is kept there.
    return [sys.executable, "-m", "pytest", *paths, "-o", f"cache_dir=.pytest_cache/{name}", *arguments]


def show(name: str, seconds: float, log: IO[bytes]) -> None:
    print(f"\n=== {name}: {seconds / 60:.1f} minutes", flush=True)
    log.seek(0)
    sys.stdout.buffer.write(log.read())
    sys.stdout.flush()


def main() -> int:
    arguments = sys.argv[1:]
    selection = arguments.pop(0) if arguments[:1] and arguments[0] in SELECTIONS else "--once"
    runs = quick_folders() if selection == "--quick" else folders()
    arguments = ["-m", SELECTIONS[selection], *arguments]
    compiling = [sys.executable, str(REPOSITORY / "tools" / "compile_kernels.py")]
    subprocess.run(compiling, cwd=REPOSITORY, check=False)
    environment = {**os.environ, "DGC_KERNELS_COMPILED": "1"}  # so that no run does it again
    # A hundred ranks import the package: let them read it compiled.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.monotonic()
    running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
    statuses: list[int] = []
    try:
        for name, paths in runs.items():
            if paths:
                log = tempfile.TemporaryFile()
                line = command(paths, name, arguments)
                process = subprocess.Popen(line, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
                running[name] = process, log
        print(f"running side by side: {', '.join(running)}; each is shown when it has ended", flush=True)
        while running:
            for name, (process, log) in list(running.items()):
                status = process.poll()
                if status is not None:
                    statuses.append(status)
                    show(name, time.monotonic() - start, log)
                    del running[name]
            time.sleep(0.2)
    except BaseException:
        for name, (process, log) in running.items():
            process.terminate()
            process.wait()
            show(name, time.monotonic() - start, log)
        raise
    statuses = [status for status in statuses if status != NO_TESTS]
    return next((status for status in statuses if status), 0) if statuses else NO_TESTS


if __name__ == "__main__":
    sys.exit(main())
