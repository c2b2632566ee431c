"""The tools that start ranks: whether the tests on real ranks can be believed."""

import pytest
from launch_tools import check_case, runs
from rank_jobs import SIZES, Ranks, each_case

pytestmark = pytest.mark.mpi

CASES = """
import os
import subprocess
import sys
import time
from worker_tools import SkipCase, case, launch_rank, report

RANK = launch_rank()

@case
def passes():
    report([os.getpid()])

@case
def fails_on_rank_1_while_the_other_waits():
    assert RANK != 1, "one is too many"
    time.sleep(1000)

@case
def is_skipped():
    raise SkipCase("not today")

@case
def hangs_on_rank_0():
    if RANK == 0:
        report([subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid])
    while RANK == 0:
        time.sleep(0.1)

@case
def ends_rank_1():
    if RANK == 1:
        os._exit(3)
    time.sleep(1000)
"""

LITTER = """
import os
import sys
import warnings
import helper
from worker_tools import case, report

@case
def finds():
    place = [os.environ.get("LITTER"), "litter" in sys.path, os.path.exists("pyproject.toml"), helper.NAME]
    report([os.getpid(), *place, len([entry for entry in warnings.filters if entry[0] == "error"]), __name__])

@case
def leaves():
    os.environ["LITTER"] = "1"
    sys.path.append("litter")
    os.chdir("/")
    warnings.simplefilter("error")
"""

OF_KINDS = """
from worker_tools import case

@case
def anywhere():
    pass

@case("4ranks")
def needs_four():
    pass

TABLE = {"one": 1, "other": 2}

@case("4ranks", way="ab", number=(1,), of=TABLE)
def has_parameters(way, number, of):
    pass
"""


def test_what_a_case_names_is_in_every_run_and_else_the_first_kind_alone(tmp_path):
    worker = tmp_path / "kinds.py"
    worker.write_text(OF_KINDS)
    (mark,) = [mark for mark in each_case(worker, SIZES).pytestmark if mark.name == "parametrize"]
    rows = {row.id: [mark.name for mark in row.marks] for row in mark.args[1]}
    assert rows == {
        "2ranks-anywhere": [],
        "4ranks-anywhere": ["matrix"],
        "4ranks-needs_four": [],
        **{f"4ranks-has_parameters-{way}-1-{of}": [] for way in "ab" for of in ("one", "other")},
    }
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


def values(ranks, worker, name):
    """What a case reported on each rank."""
    result, good = ranks.job(ranks(worker, 2).kind).run(worker, [], name, 300)
    assert good, result.explain()
    return [next(entry for entry in reports if isinstance(entry, list)) for reports in result.reports]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails_on_rank_1_while_the_other_waits", r"one is too many(.|\n)*not finish on ranks \[0\](.|\n)*other_waits"),
        ("hangs_on_rank_0", r"did not finish on ranks \[0\](.|\n)*timed out(.|\n)*in hangs_on_rank_0"),
        ("ends_rank_1", r"did not finish on ranks \[0, 1\](.|\n)*non-zero exit code"),
    ],
)
def test_a_case_that_goes_wrong_is_reported_and_the_next_one_finds_new_ranks(own, worker, name, message, monkeypatch):
    monkeypatch.setattr("rank_jobs.PATIENCE", 2.0)
    before = values(own, worker, "passes")
    result, _ = own.job(own(worker, 2).kind).run(worker, [], name, 4 if "hangs" in name else 300)
    with pytest.raises(pytest.fail.Exception, match=message):
        check_case(result, name)
    started = [entry for reports in result.reports for entry in reports if isinstance(entry, list)]
    assert len(started) == ("hangs" in name)
    after = values(own, worker, "passes")
    assert not {pid for (pid,) in before} & {pid for (pid,) in after}
    assert not any(runs(pid) for (pid,) in [*started, *before])


def test_a_case_that_skips_itself_is_a_skipped_test(own, worker):
    with pytest.raises(pytest.skip.Exception, match="not today"):
        own(worker, 2).check("is_skipped")


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
