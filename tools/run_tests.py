#!/usr/bin/env python3
"""Run the tests in two lanes side by side, and say at the end how long each test took.

    tools/run_tests.py            every behaviour once: all of tests/ but what is marked ``matrix``
    tools/run_tests.py --all      the matrix too (other numbers of ranks, launchers and versions of Keras, more seeds),
                                  and the tests of evidence/ and benchmarks/
    tools/run_tests.py --beyond   what --all has beyond a run without an option
    tools/run_tests.py --quick    the core and what compressors promise, which start no ranks

Ranks of one framework live as long as their lane; two lanes keep two cores busy. Each line of output begins
with its lane, and the seconds of every test are in ``build/tests/durations.tsv``. The exit status is that of the
first lane that failed. Other arguments are handed on to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OUTPUT = REPOSITORY / "build" / "tests"

FIRST = ("tests/adapters_torch", "tests/core", "tests/launch", "tests/torchrun")
"""Folders of the first lane; the second has all others. Balanced by the durations of both."""
TOOLS = ("evidence/tests", "benchmarks/tests")
QUICK = ("tests/core", "tests/contract")

SELECTIONS = {"--quick": "not matrix", "--once": "not matrix", "--beyond": "matrix", "--all": ""}
"""What is run of ``tests/``, as an expression of pytest's markers; ``--once`` is meant where none is named."""

NO_TESTS = 5
"""Pytest's status when nothing was selected, as ``-k`` may do to one of the lanes."""


def lanes(selection: str) -> dict[str, list[list[str]]]:
    """For each lane, the arguments of its runs of pytest, one after another."""
    folders = sorted({f"tests/{path.relative_to(REPOSITORY / 'tests').parts[0]}" for path in _files("tests")})
    marked = ["-m", SELECTIONS[selection]]
    if selection == "--quick":
        kernels = "tests/core/kernels"
        return {"kernels": [[kernels, *marked]], "others": [[*QUICK, f"--ignore={kernels}", *marked]]}
    first = [folder for folder in folders if folder in FIRST]
    runs = {"first": [[*first, *marked]], "second": [[*(f for f in folders if f not in FIRST), *marked]]}
    if selection in ("--beyond", "--all"):
        for lane, folder in zip(runs, TOOLS, strict=True):
            runs[lane].append([folder])
    return runs


def _files(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("test_*.py"))


def command(lane: str, number: int, arguments: list[str]) -> list[str]:
    """One run of pytest; what failed last and the durations are kept by lane."""
    report = OUTPUT / f"{lane}-{number}.xml"
    kept = [
        "--disable-warnings",
        "-o",
        f"cache_dir=.pytest_cache/{lane}",
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
    ]
    return [sys.executable, "-m", "pytest", *kept, *arguments]


def durations() -> list[tuple[float, str, str]]:
    """Seconds, module and name of every test that was run, the longest first."""
    found = []
    for report in OUTPUT.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            found.append((float(case.get("time", 0)), case.get("classname", ""), case.get("name", "")[:100]))
    return sorted(found, reverse=True)


def show_durations() -> None:
    """Write all durations to a file, and the longest by file and by test to stdout."""
    tests = durations()
    lines = [f"{seconds:.2f}\t{file}\t{name}\n" for seconds, file, name in tests]
    (OUTPUT / "durations.tsv").write_text("".join(lines))
    files: dict[str, float] = {}
    for seconds, file, _ in tests:
        files[file] = files.get(file, 0.0) + seconds
    print(f"\n=== {sum(files.values()):.0f} seconds of {len(tests)} tests, in {OUTPUT}/durations.tsv")
    longest = sorted(files, key=files.__getitem__, reverse=True)[:25]
    print("".join(f"{files[file]:8.1f}  {file}\n" for file in longest))
    print("".join(f"{seconds:8.1f}  {file}::{name}\n" for seconds, file, name in tests[:15]), flush=True)


def main() -> int:
    """Run what the arguments select; returns the exit status."""
    arguments = sys.argv[1:]
    selection = arguments.pop(0) if arguments[:1] and arguments[0] in SELECTIONS else "--once"
    compiling = [sys.executable, "-m", "dgc", "compile"]
    subprocess.run(compiling, cwd=REPOSITORY, check=False)
    # No lane compiles again, and lines come at once.
    environment = {**os.environ, "DGC_KERNELS_COMPILED": "1", "PYTHONUNBUFFERED": "1"}
    # A hundred ranks import the package: let them read it compiled.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for report in OUTPUT.glob("*.xml"):
        report.unlink()
    running: list[subprocess.Popen[str]] = []
    interrupted = threading.Event()

    def run(lane: str, runs: list[list[str]]) -> list[int]:
        statuses = []
        for number, each in enumerate(runs):
            if interrupted.is_set():
                break
            process = subprocess.Popen(
                command(lane, number, [*each, *arguments]),
                cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace",
            )  # fmt: skip
            running.append(process)
            for line in process.stdout or ():
                print(f"{lane:>7} | {line}", end="", flush=True)
            statuses.append(process.wait())
        return statuses

    with ThreadPoolExecutor() as pool:
        running_lanes = [pool.submit(run, *lane) for lane in lanes(selection).items()]
        try:
            statuses = [status for each in running_lanes for status in each.result()]
        except BaseException:  # the pool waits for the lanes
            interrupted.set()
            for process in running:
                process.terminate()
            raise
    show_durations()
    ran = [status for status in statuses if status != NO_TESTS]
    return next(filter(None, ran), 0) if ran else NO_TESTS


if __name__ == "__main__":
    sys.exit(main())
