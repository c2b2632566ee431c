"""What the scripts of chaos make of what they see: with which job a cell is compared."""

import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos"


@pytest.fixture
def chaos(monkeypatch):
    """Its folder is on the path, as when a script of it runs; its modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(CHAOS.parent))
    monkeypatch.syspath_prepend(str(CHAOS))
    yield CHAOS
    for name in set(sys.modules) - before:
        if str(CHAOS.parent) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


FOUND = {"seconds": 1.0, "status": 0, "reads": "", "left": [], "output": "", "stacks": ""}


class Jobs:
    """Stands in for ``run_cell``: each version of the package ends with parameters of its own."""

    def __init__(self):
        self.version, self.done, self.different = 1, [], set()

    def __call__(self, way, launcher, fault, *options):
        self.done.append((fault, way, launcher))
        digest = f"{way} {self.version}{' off' * ((fault, way) in self.different)}"
        more = {"resumed": None, "resumed_digests": None}
        wanted = "ends, clear" if fault == "kill" else "goes on"
        return {
            "way": way,
            "launcher": launcher,
            "fault": fault,
            "verdict": wanted,
            "digests": [digest] * 2,
            **FOUND,
            **more,
        }


@pytest.fixture
def run(chaos, monkeypatch, tmp_path):
    import matrix
    import report

    jobs = Jobs()
    monkeypatch.setattr(matrix, "run_cell", jobs)

    def main(*options):
        monkeypatch.setattr(sys, "argv", ["matrix.py", "--json", str(tmp_path / "chaos.json"), *options])
        jobs.done = []
        matrix.main()
        return {key: row["verdict"] for key, row in report.read_rows(tmp_path / "chaos.json").items()}

    main.jobs = jobs
    return main


CELL = ("--ways", "A,dense", "--launchers", "gloo", "--quick")


def test_a_cell_is_compared_with_a_job_of_the_same_run(run):
    run("--faults", "none", *CELL)
    run.jobs.version = 2
    found = run("--faults", "fork", *CELL)
    assert set(found.values()) == {"goes on"}
    assert sorted(run.jobs.done) == [(f, w, "gloo") for f in ("fork", "none") for w in ("A", "dense")]
    run.jobs.different = {("fork", "A")}
    found = run("--faults", "fork", *CELL)
    assert [found[way, "gloo", "fork"] for way in ("A", "dense")] == ["WRONG", "goes on"]


def test_nothing_is_run_in_vain(run):
    run("--faults", "kill", *CELL)
    assert sorted(run.jobs.done) == [("kill", "A", "gloo"), ("kill", "dense", "gloo")]
    run("--faults", "none,fork,stop", *CELL, "--ways", "A")
    assert sorted(run.jobs.done) == [("fork", "A", "gloo"), ("none", "A", "gloo"), ("stop", "A", "gloo")]
    run("--faults", "none,fork,stop,kill", *CELL, "--missing")
    assert sorted(run.jobs.done) == [("fork", "dense", "gloo"), ("none", "dense", "gloo"), ("stop", "dense", "gloo")]


def test_a_job_to_compare_with_that_did_not_come_to_its_end_is_said(run):
    run.jobs.different = {("none", "A")}
    jobs = run.jobs.__call__

    def hangs(way, launcher, fault, *options):
        row = jobs(way, launcher, fault, *options)
        return {**row, "verdict": "HANGS", "digests": ["", ""]} if (way, fault) == ("A", "none") else row

    import matrix

    matrix.run_cell = hangs
    found = run("--faults", "fork", *CELL)
    assert found["A", "gloo", "none"] == "HANGS"
    assert found["A", "gloo", "fork"] == "not compared"
    assert found["dense", "gloo", "fork"] == "goes on"
