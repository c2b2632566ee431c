"""``examples/torch_digits.py``: unchanged under each launcher, and learning what it should."""

import json
from pathlib import Path

import pytest
from launch_tools import REPOSITORY, run_mpi
from rank_jobs import once

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

EXAMPLE = REPOSITORY / "examples" / "torch_digits.py"
CHANCE = 0.1


STARTED = {"horovodrun": 2, "single": 1}
"""Ranks of launches that are started for each training."""


@pytest.fixture(scope="module")
def train(ranks):
    """A function that runs the example and returns what it reports."""

    def run(folder: Path, *options: object, launcher: str = "mpirun") -> dict:
        report = folder / "report.json"
        arguments = {"launcher": launcher, "timeout": 300}
        if launcher in STARTED:
            result = run_mpi(STARTED[launcher], EXAMPLE, *options, "--json", report, **arguments)
        else:
            result = ranks.run(EXAMPLE, 2, *options, "--json", report, **arguments)
        assert "accuracy" in result.stdout, result.explain()
        return json.loads(report.read_text())

    return run


LAUNCHES = {"horovodrun": "a", "gloo": "a", "mpirun": "a", "mpirun, way b": "b"}


@pytest.fixture(scope="module")
def launches(train, tmp_path_factory):
    """The same short training with each launcher, started when a test asks for it."""
    reports = {}

    def get(launch: str) -> dict:
        if launch not in reports:
            options = ("--epochs", 4, "--way", LAUNCHES[launch])
            reports[launch] = train(tmp_path_factory.mktemp("run"), *options, launcher=launch.split(",")[0])
        return reports[launch]

    return get


@pytest.mark.parametrize("launch", once(LAUNCHES))
def test_learns_and_sends_a_thousandth_under_each_launcher(launch, launches):
    report = launches(launch)

    assert report["ranks"] == 2
    assert report["replicas_identical"]
    assert report["accuracy"] > 4 * CHANCE
    assert report["parameters_sparsified"] >= 0.95 * report["parameters"]
    assert report["rampup_ends"] <= 0.2 * report["steps"]
    assert report["dense_bytes_per_step"] == 4 * report["parameters"]
    assert report["bytes_last_step"] * 500 < report["dense_bytes_per_step"]


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_launcher_and_way_do_not_change_a_single_bit(launches):
    assert len({launches(launch)["digest"] for launch in LAUNCHES}) == 1


def test_one_process_trains_with_plain_sgd(train, tmp_path):
    report = train(tmp_path, "--epochs", 3, launcher="single")

    assert report["ranks"] == 1
    assert report["accuracy"] > 5 * CHANCE
    assert report["bytes_total"] == 0


@pytest.mark.parametrize(("compression", "share"), [("fp16", 0.5), pytest.param("none", 1.0, marks=pytest.mark.matrix)])
def test_horovod_s_own_compressions_still_work(train, compression, share, tmp_path):
    report = train(tmp_path, "--epochs", 2, "--nesterov", "--compression", compression)

    assert report["replicas_identical"]
    assert report["accuracy"] > 2 * CHANCE
    assert report["bytes_total"] == share * report["dense_bytes_per_step"] * report["steps"]


@pytest.mark.parametrize(
    ("compression", "option", "ratio"),
    [("qsgd", "bits=8", 3.9), pytest.param("topk", "sparsity=0.99", 60, marks=pytest.mark.matrix)],
)
def test_other_compressors_by_name_with_options(train, compression, option, ratio, tmp_path):
    report = train(tmp_path, "--epochs", 4, "--compression", compression, "--option", option, "--way", "b")

    assert report["replicas_identical"]
    assert report["accuracy"] > 4 * CHANCE
    assert report["bytes_last_step"] * ratio < report["dense_bytes_per_step"]


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_what_is_not_sent_must_be_kept(train, tmp_path):
    """The control that forgets it learns far less in the same steps and bytes."""
    kept = train(tmp_path, "--epochs", 10)
    forgotten = train(tmp_path, "--epochs", 10, "--drop-residual")

    assert forgotten["bytes_total"] == kept["bytes_total"]
    assert kept["accuracy"] > forgotten["accuracy"] + 0.05
