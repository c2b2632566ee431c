"""``tools/run_tests.py`` runs every test: in its folders, and either once or in the matrix."""

import importlib.util
import subprocess
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


def test_every_test_file_is_in_one_run(run_tests):
    files = sorted(REPOSITORY.glob("tests/**/test_*.py"))
    folders = [REPOSITORY / path for paths in run_tests.folders().values() for path in paths]
    ran = [file for folder in folders for file in folder.rglob("test_*.py")]
    assert len(files) > 200
    assert sorted(ran) == files


def test_once_and_beyond_are_all(run_tests):
    def selected(option):
        pytest_command = run_tests.command([WITH_A_MATRIX], "selection", ["-m", run_tests.SELECTIONS[option]])
        command = [*pytest_command, "--collect-only", "-q"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600)
        return [line for line in done.stdout.splitlines() if "::" in line]

    once, beyond, everything = map(selected, ("--once", "--beyond", "--all"))
    assert once
    assert beyond
    assert sorted(once + beyond) == sorted(everything)
