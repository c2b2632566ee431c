"""The tool that starts ranks: its tests decide whether the other multi-rank tests can be believed."""

import pytest
from launch_tools import LaunchError, run_cases, run_mpi, runs

pytestmark = pytest.mark.mpi

CASES = """
import os, subprocess, sys, time
from worker_tools import SkipCase, case, launch_rank, report

@case
def passes():
    pass

@case
def fails_on_rank_1():
    assert launch_rank() != 1, "one is too many"

@case
def is_skipped():
    raise SkipCase("not today")

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
"""


def test_cases_are_told_apart_and_a_hanging_job_is_killed_with_all_it_started(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(CASES)
    cases = run_cases(2, worker, timeout=12)
    assert cases.result.timed_out
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
    for name in ("comes_too_late", "unknown"):
        with pytest.raises(pytest.fail.Exception, match=rf"'{name}' did not finish on ranks \[0"):
            cases.check(name)


@pytest.mark.parametrize(
    ("source", "timeout", "match"),
    [
        ("import time; time.sleep(60)\n", 2, "timed out after"),
        ("import sys; sys.exit('it gives up')\n", 300, r"returned 1 (.|\n)*it gives up"),
    ],
)
def test_a_job_that_fails_is_an_error_with_what_it_wrote(source, timeout, match):
    with pytest.raises(LaunchError, match=match):
        run_mpi(1, source, launcher="single", timeout=timeout)
