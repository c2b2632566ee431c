"""What compressing costs besides the network: steps of the real exchange with nobody else."""

import itertools

import pytest

from dgc.adapter.speed import work
from dgc.adapter.speed.work import ROUNDS, STEPS, WARM_STEPS, Cost, Echo, last_level, measure_cost, time_work
from dgc.core.compressors import compressor_names, make_config
from dgc.core.kernels.choose import choose_kernels


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("dgc.adapter.speed.work.SHAPE", (64, 64))


@pytest.mark.parametrize("name", compressor_names())
@pytest.mark.parametrize("entries_alone", [True, False])
def test_every_compressor_can_be_tried(name, entries_alone):
    config = make_config({}, algorithm=name)
    found = time_work(config, 16, entries_alone, choose_kernels("cpu"))
    assert found.sparse > 0
    assert found.dense > 0


def clock_of(durations):
    """Seconds that pass in one step after the other."""
    seconds = itertools.accumulate(itertools.chain.from_iterable((0, d) for d in durations))
    return lambda: next(seconds)


WARM = [100] * (3 * WARM_STEPS)


def test_further_ranks_cost_what_the_difference_says():
    """Steps of 2 and of 4 ranks take 10 and 14, dense ones 3: so each rank costs 2 and 5 ranks 16."""
    durations = [d for d in (10, 14, 3) for _ in range(STEPS)] * ROUNDS
    found = time_work(make_config({}), 5, True, choose_kernels("cpu"), clock_of(WARM + durations))
    assert (found.sparse, found.dense) == pytest.approx((16 / 64**2, 3 / 64**2))


@pytest.mark.parametrize("first", range(0, 3 * ROUNDS * STEPS, 2))
def test_what_else_runs_for_a_while_does_not_favour_one_way(first):
    """As long as it does not last for nearly all rounds."""
    durations = [d for d in (10, 14, 3) for _ in range(STEPS)] * ROUNDS
    slowed = range(first, first + 2 * 3 * STEPS)
    durations = [10 * d if i in slowed else d for i, d in enumerate(durations)]
    found = time_work(make_config({}), 5, True, choose_kernels("cpu"), clock_of(WARM + durations))
    assert (found.sparse, found.dense) == pytest.approx((16 / 64**2, 3 / 64**2))


def test_it_is_measured_once_for_the_same_options(monkeypatch):
    made = []
    monkeypatch.setattr(work, "_known", {})
    monkeypatch.setattr(work, "time_work", lambda *given: made.append(given) or Cost(len(made), 0))
    configs = [make_config({"sparsity": s, "error_feedback": f}) for s, f in ((0.1, True), (0.2, True), (0.1, False))]
    assert [measure_cost(c, 2, True).sparse for c in configs * 2] == [1, 2, 3] * 2
    assert measure_cost(configs[0], 3, True) != measure_cost(configs[0], 2, False)


def test_it_is_the_end_of_the_ramp_up_that_counts():
    config = make_config({"sparsity": [0.5, 0.9], "rampup_begin_step": 9, "exclude": "*", "exchange": "auto"})
    last = last_level(config)
    assert (last.sparsity, last.rampup_begin_step, last.exclude, last.exchange) == ((0.9,), 0, (), "sparse")


def test_an_echo_stands_for_any_number_of_ranks():
    assert Echo(7).size == 7
