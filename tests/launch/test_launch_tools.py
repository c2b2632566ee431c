"""The tool that starts ranks: its tests decide whether the other multi-rank tests can be believed."""

import psutil
import pytest
from launch_tools import LaunchError, case_names, run_cases, run_mpi

pytestmark = pytest.mark.mpi

CASES = """
import os, subprocess, sys, time
from worker_tools import SkipCase, case, launch_rank, report, run_cases

@case
def passes():
    pass

@case
def fails_on_rank_1():
    assert launch_rank() != 1, "one is too many"

@case
def is_skipped():
    raise SkipCase("not today")

def helper():
    raise AssertionError("not a case")

@case
def hangs_on_rank_0():
    if launch_rank() == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        report({"pids": [os.getpid(), child.pid]})
    while launch_rank() == 0:
        time.sleep(0.1)

@case
def comes_too_late():
    pass

if __name__ == "__main__":
    run_cases()
"""


def test_reports_come_back_by_rank_also_of_a_job_that_fails():
    source = """
from pathlib import Path
from worker_tools import launch_rank, launch_size, report
import numpy as np, os, sys, time
report("first")
report([launch_rank(), launch_size(), sys.argv[1:], np.arange(2)])
if launch_rank() == 1:  # the launcher then ends the others, so they report before
    reports = Path(os.environ["DGC_TEST_REPORTS"])
    while sum(file.read_text().count("\\n") for file in reports.glob("rank*.jsonl")) < 2 * launch_size():
        time.sleep(0.05)
    sys.exit("rank 1 gives up")
"""
    result = run_mpi(3, source, "a", 7, check=False)
    assert result.values == [[rank, 3, ["a", "7"], [0, 1]] for rank in range(3)]
    assert [reports[0] for reports in result.reports] == ["first"] * 3
    assert result.returncode != 0
    assert "rank 1 gives up" in result.stderr


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_cases_are_told_apart_and_a_hanging_job_is_killed_with_all_it_started(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(CASES)
    assert case_names(worker) == ["passes", "fails_on_rank_1", "is_skipped", "hangs_on_rank_0", "comes_too_late"]
    cases = run_cases(2, worker, timeout=12)
    assert cases.result.timed_out
    assert "timed out after" in cases.result.explain()
    (started,) = [found["pids"] for found in cases.result.reports[0] if "pids" in found]
    assert not any(map(runs, started))
    cases.check("passes")
    with pytest.raises(pytest.fail.Exception, match=r"failed on rank 1:(.|\n)*one is too many"):
        cases.check("fails_on_rank_1")
    with pytest.raises(pytest.skip.Exception, match="not today"):
        cases.check("is_skipped")
    # The rank that hangs has written where.
    with pytest.raises(pytest.fail.Exception, match=r"did not finish on ranks \[0\](.|\n)*in hangs_on_rank_0"):
        cases.check("hangs_on_rank_0")
    with pytest.raises(pytest.fail.Exception, match=r"'comes_too_late' did not finish on ranks \[0"):
        cases.check("comes_too_late")
    with pytest.raises(pytest.fail.Exception, match=r"'unknown' did not finish on ranks \[0, 1\]"):
        cases.check("unknown")


def test_without_a_launcher_there_is_one_rank():
    assert run_mpi(1, "from worker_tools import report\nreport(1)\n", launcher="single").values == [1]
    with pytest.raises(LaunchError, match="timed out after"):
        run_mpi(1, "import time\ntime.sleep(60)\n", launcher="single", timeout=1)
    with pytest.raises(LaunchError, match=r"returned 1 (.|\n)*it gives up"):
        run_mpi(1, "import sys\nsys.exit('it gives up')\n", launcher="single")
    with pytest.raises(ValueError, match="one rank"):
        run_mpi(2, "pass\n", launcher="single")
    with pytest.raises(ValueError, match="launcher must be one of"):
        run_mpi(2, "pass\n", launcher="slurm")
