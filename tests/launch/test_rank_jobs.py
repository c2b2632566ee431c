"""Living ranks: what they report must be what ranks of their own would have reported."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import rank_jobs
from launch_tools import TESTS, LaunchError
from rank_jobs import SIZES, Ranks, each_case
from rank_reset import restore_environment

pytestmark = pytest.mark.mpi

CASES = """
import os
import sys
import time
from worker_tools import SkipCase, case, launch_rank, launch_size, report, run_cases

RANK = launch_rank()

@case
def passes():
    print("written by", RANK)
    report([os.getpid(), launch_size()])

@case
def fails_on_rank_1():
    assert RANK != 1, "one is too many"

@case
def fails_on_rank_1_while_the_other_waits():
    assert RANK != 1, "one is too many"
    time.sleep(1000)

@case
def is_skipped():
    raise SkipCase("not today")

@case
def hangs_on_rank_0():
    while RANK == 0:
        time.sleep(0.1)

@case
def ends_rank_1():
    if RANK == 1:
        os._exit(3)
    time.sleep(1000)

@case
def leaves_rank_1():
    if RANK == 1:
        sys.exit()

if __name__ == "__main__":
    run_cases()
"""

LITTER = """
import os
import sys
import warnings
import helper
from worker_tools import case, launch_rank, report, run_cases

@case
def finds():
    place = [os.environ.get("LITTER"), "litter" in sys.path, os.path.exists("pyproject.toml"), helper.NAME]
    shown = [entry for entry in warnings.filters if entry[0] == "error"]
    report([os.getpid(), *place, len(shown), __name__])

@case
def leaves():
    os.environ["LITTER"] = "1"
    sys.path.append("litter")
    os.chdir("/")
    warnings.simplefilter("error")

if __name__ == "__main__":
    run_cases()
"""


OF_KINDS = """
from worker_tools import case

@case
def anywhere():
    pass

@case("4ranks")
def needs_four():
    pass

@case("2ranks", "4ranks")
def differs():
    pass
"""


def test_between_workers_an_unchanged_environment_is_not_written(monkeypatch):
    # A thread of TensorFlow's that called getenv meanwhile crashed the rank.
    written = []
    for name in ("putenv", "unsetenv"):
        monkeypatch.setattr(os, name, lambda *a: written.append(a))
    restore_environment(dict(os.environ))
    assert written == []


def test_what_a_case_names_is_in_every_run_and_else_the_first_kind_alone(tmp_path):
    worker = tmp_path / "kinds.py"
    worker.write_text(OF_KINDS)
    (mark,) = [mark for mark in each_case(worker, SIZES).pytestmark if mark.name == "parametrize"]
    rows = {row.id: [mark.name for mark in row.marks] for row in mark.args[1]}
    assert rows == {
        "2ranks-anywhere": [],
        "2ranks-differs": [],
        "4ranks-anywhere": ["matrix"],
        "4ranks-needs_four": [],
        "4ranks-differs": [],
    }


def test_a_case_that_names_a_kind_that_its_test_has_not_would_never_run(tmp_path):
    worker = tmp_path / "kinds.py"
    worker.write_text(OF_KINDS)
    with pytest.raises(ValueError, match=r"kinds\.py: a case names \['4ranks'\]; the test has \['2ranks'\]"):
        each_case(worker)


@pytest.fixture(scope="module")
def own():
    """Jobs that these tests may break."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "breaking.py"
    path.write_text(CASES)
    return path


def values(ranks, worker, name, size=2):
    """What a case reported on each rank."""
    cases = ranks(worker, size)
    result, good = ranks.job(cases.kind).run(worker, [], name, 300)
    assert good, result.explain()
    return [next(entry for entry in reports if isinstance(entry, list)) for reports in result.reports]


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails_on_rank_1_while_the_other_waits", r"one is too many(.|\n)*not finish on ranks \[0\](.|\n)*other_waits"),
        ("hangs_on_rank_0", r"did not finish on ranks \[0\](.|\n)*timed out(.|\n)*in hangs_on_rank_0"),
        ("ends_rank_1", r"did not finish on ranks \[0, 1\](.|\n)*non-zero exit code"),
        ("leaves_rank_1", r"did not finish on ranks \[1\]"),
    ],
)
def test_a_case_that_goes_wrong_is_reported_and_the_next_one_finds_new_ranks(own, worker, name, message, monkeypatch):
    if "waits" in name:
        monkeypatch.setattr(rank_jobs, "PATIENCE", 2.0)
    cases = own(worker, 2, timeout=4 if "hangs" in name else None)
    before = values(own, worker, "passes")
    with pytest.raises(pytest.fail.Exception, match=message):
        cases.check(name)
    after = values(own, worker, "passes")
    assert not {pid for pid, _ in before} & {pid for pid, _ in after}
    assert not any(runs(pid) for pid, _ in before)


def test_good_cases_share_their_ranks_which_stand_still_in_between(own, worker):
    first = values(own, worker, "passes")
    own(worker, 2).check("passes")
    with pytest.raises(pytest.skip.Exception, match="not today"):
        own(worker, 2).check("is_skipped")
    assert values(own, worker, "passes") == first
    assert [size for _, size in first] == [2, 2]
    # On a busy machine the signal takes its time; the test's own limit ends this loop.
    while {psutil.Process(pid).status() for pid, _ in first} != {psutil.STATUS_STOPPED}:
        time.sleep(0.05)


def test_a_worker_finds_nothing_of_the_one_before(own, tmp_path):
    pids = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper.py").write_text(f"NAME = {name!r}")
        worker = folder / f"litter_{name}.py"
        worker.write_text(LITTER)
        for pid, *found in values(own, worker, "finds"):
            assert found == [None, False, True, name, 0, f"litter_{name}"]
            pids.add(pid)
        own(worker, 2).check("leaves")
    assert len(pids) == 2


def test_a_worker_that_cannot_be_imported_fails_with_its_error(own, tmp_path):
    worker = tmp_path / "broken.py"
    worker.write_text("from worker_tools import case\n1 / 0\n")
    with pytest.raises(pytest.fail.Exception, match=r"failed on rank 0:(.|\n)*broken.py(.|\n)*ZeroDivisionError"):
        own(worker, 2).check("anything")


def test_a_worker_that_declares_it_gets_ranks_of_its_own(own, worker):
    living = values(own, worker, "passes")
    worker.write_text(CASES + "\nFRESH = 'ends a rank'\n")
    cases = own(worker, 2)
    cases.check("passes")
    reports = cases._launched.result.reports
    assert not {pid for pid, _ in living} & {entry[0] for rank in reports for entry in rank if isinstance(entry, list)}
    with pytest.raises(pytest.fail.Exception, match="one is too many"):
        cases.check("fails_on_rank_1")
    assert [own.job(cases.kind).alive, values(own, worker, "passes")] == [True, living]


def test_scripts(own, tmp_path):
    source = """
import pickle, sys
from worker_tools import launch_rank, report

class Mine:
    pass

report([__name__, sys.argv[1:], type(pickle.loads(pickle.dumps(Mine()))) is Mine])
if launch_rank() == 1 and "fail" in sys.argv:
    print("on the way", file=sys.stderr)
    raise ValueError("rank 1 gives up")
"""
    path = tmp_path / "script.py"
    path.write_text(source)
    for script in (source, path):
        assert own.run(script, 2, "a", 7).values == [["__main__", ["a", "7"], True]] * 2
    with pytest.raises(LaunchError, match=r"on the way\n(.|\n)*rank 1 gives up"):
        own.run(source, 2, "fail")
    result = own.run(source, 2, "fail", check=False)
    assert result.returncode != 0
    assert result.values == [["__main__", ["fail"], True]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a launcher that its parent is gone")
def test_a_test_process_that_is_killed_leaves_no_ranks(worker):
    source = f"""
    import os, pathlib, signal
    from rank_jobs import Ranks
    ranks, worker = Ranks(), pathlib.Path({str(worker)!r})
    cases = ranks(worker, 2)
    job = ranks.job(cases.kind)
    result, good = job.run(worker, [], "passes", 300)
    print(*job.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=300)
    assert not alive
