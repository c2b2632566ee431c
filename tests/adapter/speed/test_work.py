"""What compressing costs besides the network: steps of the real exchange with nobody else."""

import itertools

import pytest

from dgc.adapter.speed.work import STEPS, WARM_STEPS, Echo, last_level, time_work
from dgc.core.compressors.build import make_config
from dgc.core.compressors.registry import compressor_names
from dgc.core.kernels.choose import choose_kernels


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("dgc.adapter.speed.work.SHAPE", (64, 64))


@pytest.mark.parametrize("name", compressor_names())
@pytest.mark.parametrize("entries_alone", [True, False])
def test_every_compressor_can_be_tried(name, entries_alone):
    config = make_config({}, algorithm=name)
    work = time_work(config, 16, entries_alone, choose_kernels("cpu"))
    assert work.sparse > 0
    assert work.dense > 0


def test_further_ranks_cost_what_the_difference_says():
    """Steps of 2 and of 4 ranks take 10 and 14, dense ones 3: so each rank costs 2 and 5 ranks 16."""
    durations = itertools.chain(*([[0, d] * (WARM_STEPS + STEPS) for d in (10, 14, 3)]))
    seconds = itertools.accumulate(durations)
    work = time_work(make_config({}), 5, True, choose_kernels("cpu"), lambda: next(seconds))
    assert (work.sparse, work.dense) == pytest.approx((16 / 64**2, 3 / 64**2))


def test_it_is_the_end_of_the_ramp_up_that_counts():
    config = make_config({"sparsity": [0.5, 0.9], "rampup_begin_step": 9, "exclude": "*", "exchange": "auto"})
    last = last_level(config)
    assert (last.sparsity, last.rampup_begin_step, last.exclude, last.exchange) == ((0.9,), 0, (), "sparse")


def test_an_echo_stands_for_any_number_of_ranks():
    assert Echo(7).size == 7
