"""Which trainings there are, and what is expected of their durations."""

from __future__ import annotations

from evidence.applications import CLASSES
from evidence.estimate import EXPECTED, Estimate
from evidence.plan import Run, plan
from evidence.variants import VARIANTS


def test_every_run_is_one_of_a_known_variant_and_stands_once():
    runs = plan([0, 1, 2])
    assert len({run.id for run in runs}) == len(runs)
    assert {run.variant for run in runs} == set(VARIANTS)
    assert {run.application for run in runs} == set(CLASSES)


def test_the_first_seed_of_everything_comes_first_and_dense_and_dgc_before_the_rest():
    runs = plan([4, 7])
    assert [run.seed for run in runs] == [4] * (len(runs) // 2) + [7] * (len(runs) // 2)
    assert [run.variant for run in runs[: 2 * len(CLASSES)]] == ["dense", "dgc"] * len(CLASSES)


def test_chosen_applications_alone():
    assert {run.application for run in plan([0], ["speech", "image"])} == {"speech", "image"}


def test_an_estimate_learns_from_what_runs_took():
    runs = plan([0], ["language", "image"])
    estimate = Estimate("full", {})
    assert estimate.left(None, 0, {}, runs) == sum(EXPECTED["full"][run.application] for run in runs)
    estimate.add(Run("language", "dense", 0), {"seconds": 10}, 2 * EXPECTED["full"]["language"])
    # The machine is half as fast: so it will be with the others.
    assert estimate.of("image") == 2 * EXPECTED["full"]["image"]
    # A run that was resumed took longer than this part of it.
    estimate.add(Run("image", "dense", 0), {"seconds": 500}, 3)
    assert estimate.of("image") == 500


def test_an_estimate_of_the_run_under_way_follows_its_epochs():
    estimate, run = Estimate("full", {}), Run("language", "dgc", 0)
    assert estimate.left(run, 30, {"epoch": 2, "epochs": 6, "resumed_at": 0}, []) == 60
    assert estimate.left(run, 30, {"epoch": 5, "epochs": 6, "resumed_at": 4}, []) == 30
