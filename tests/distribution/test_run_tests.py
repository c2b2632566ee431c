"""``tools/run_tests.py`` runs every test: in its folders, and either once or in the matrix."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WITH_A_MATRIX = "tests/transport/test_mpi.py"


@pytest.fixture
def run_tests():
    spec = importlib.util.spec_from_file_location("run_tests", REPOSITORY / "tools" / "run_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collected(run_tests, selection):
    """Test files that a selection runs, by the paths that its lanes are given."""
    paths = [
        REPOSITORY / argument
        for runs in run_tests.lanes(selection).values()
        for run in runs
        for argument in run
        if (REPOSITORY / argument).is_dir() and argument
    ]
    return sorted(file for path in paths for file in path.rglob("test_*.py"))


def test_every_test_file_is_in_one_lane(run_tests):
    tests = sorted(REPOSITORY.glob("tests/**/test_*.py"))
    others = sorted(file for folder in ("evidence", "benchmarks") for file in (REPOSITORY / folder).rglob("test_*.py"))
    assert tests
    assert others
    assert collected(run_tests, "--once") == tests
    assert collected(run_tests, "--all") == sorted(tests + others)


def test_once_and_beyond_are_all(run_tests):
    def selected(option):
        marked = ["-m", run_tests.SELECTIONS[option]]
        command = [sys.executable, "-m", "pytest", WITH_A_MATRIX, *marked, "--collect-only", "-q"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600)
        return [line for line in done.stdout.splitlines() if "::" in line]

    once, beyond, everything = map(selected, ("--once", "--beyond", "--all"))
    assert once
    assert beyond
    assert sorted(once + beyond) == sorted(everything)
