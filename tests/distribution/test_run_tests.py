"""``tools/run_tests.py`` runs every test: in its folders, and either once or in the matrix."""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


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
