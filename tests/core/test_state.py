"""u, v and the step: averaged, saved, loaded; states that are none, damaged, or of no moment between two steps."""

import copy
import math

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks, run_step

from dgc.errors import LayoutError


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (3, 2), (2, 3), (1, 2), (2, 2)])
@pytest.mark.parametrize(("op", "begin"), [("average", 0), ("sum", 0), ("sum", 100)])
@pytest.mark.parametrize("small", ["float32", "int8"])
def test_another_number_of_ranks_keeps_the_mean_or_the_sum_of_residuals_and_momentum(old, new, op, begin, small):
    options = dict(sparsity=0.95, momentum=0.9, op=op, rampup_begin_step=begin, small=small)

    def save(exchange, rank):
        for step in range(8):
            run_step(exchange, gradients(step, rank))
        before = exchange.state_dict()
        exchange.average()
        return before, exchange.state_dict()

    saved = on_ranks(old, save, **options)

    def load(exchange, rank):
        exchange.load_state_dict(saved[0][1])
        return exchange.state_dict()["parameters"]

    found = on_ranks(new, load, **options)
    before = [state["parameters"] for state, _ in saved]
    assert any("error" in entry for entry in before[0].values()) is (small == "int8" and begin == 0)
    total = np.mean if op == "average" else np.sum
    for name, entry in before[0].items():
        for key in entry.keys() & {"u", "v", "error"}:
            for each in saved:
                np.testing.assert_array_equal(each[1]["parameters"][name][key], saved[0][1]["parameters"][name][key])
            if key == "u" and "v" not in entry:
                for each in found:
                    np.testing.assert_array_equal(each[name][key], entry[key])
                continue
            zeros = np.zeros_like(entry[key])
            then, now = (total([each[name].get(key, zeros) for each in ranks], axis=0) for ranks in (before, found))
            np.testing.assert_allclose(now, then, atol=1e-6 if op == "average" else 1e-5)


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.filterwarnings("ignore:NaN, infinity")
def test_an_average_after_a_refused_first_sparsified_step_also_averages_momentum(begin):
    def steps(exchange, rank):
        for step in range(begin + 1):
            given = gradients(step, rank)
            if step == begin and rank == 0:
                given[0][3] = np.inf
            refused, _ = run_step(exchange, given)
        before = exchange.state_dict()["parameters"]
        exchange.average()
        return refused, before, exchange.state_dict()["parameters"]

    rows = on_ranks(3, steps, sparsity=0.9, momentum=0.9, rampup_begin_step=begin)
    assert all(refused for refused, *_ in rows)
    for name in rows[0][1]:
        for key in {"u", "v"} & set(rows[0][1][name]):
            mean = sum(before[name][key] for _, before, _ in rows) / 3
            for *_, after in rows:
                np.testing.assert_array_equal(after[name][key], rows[0][2][name][key])
            np.testing.assert_allclose(rows[0][2][name][key], mean, atol=1e-6)


@pytest.mark.parametrize("renew", ["average", "reset"])
def test_thresholds_are_forgotten_with_the_residuals_from_which_they_were_learnt(renew):
    """After an average, they differ between ranks. After a reset, they would select too few entries."""

    def forget(exchange, rank):
        for bucket in exchange.state.buckets:
            bucket.thresholds[...] = 1.0 + rank
        getattr(exchange, renew)()
        return np.concatenate([bucket.thresholds.ravel() for bucket in exchange.state.buckets])

    for thresholds in on_ranks(2, forget, sparsity=0.9):
        assert thresholds.size
        assert np.isnan(thresholds).all()


@pytest.mark.parametrize(("op", "share"), [("average", 1.0), ("sum", 0.25)])
def test_adopted_momentum_is_each_ranks_share_where_entries_are_selected(op, share):
    def adopt(exchange, rank):
        for i, each in enumerate(exchange.layout.parameters):
            exchange.state.absorb_momentum(i, np.ones(each.numel, np.float32))
        return exchange

    exchange = on_ranks(4, adopt, op=op, momentum=0.9)[0]
    for i in range(len(exchange.layout.parameters)):
        selected = exchange.state.residual(i).size > 0
        assert np.all(exchange.state.momentum_buffer(i) == (share if selected else 1.0))


SPARSE, DENSE = "fc.weight", "fc.bias"


def changed(state, name, key, value):
    other = copy.deepcopy(state)
    other["parameters"][name][key] = value
    return other


def without(state, *keys):
    other = copy.deepcopy(state)
    place = other
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return other


def spoiled(array, value):
    other = array.copy()
    other[3] = value
    return other


BAD = {
    "a NaN in v": (
        lambda s: changed(s, SPARSE, "v", spoiled(s["parameters"][SPARSE]["v"], math.nan)),
        "v of .fc.weight.*1 values",
    ),
    "inf in u": (lambda s: changed(s, DENSE, "u", spoiled(s["parameters"][DENSE]["u"], math.inf)), "not finite"),
    "text in u": (lambda s: changed(s, DENSE, "u", "much"), "not of numbers"),
    "ragged u": (lambda s: changed(s, DENSE, "u", [[1.0], [1.0, 2.0]]), "is not an array"),
    "a NaN in error": (lambda s: changed(s, DENSE, "error", np.full(33, math.nan)), "error of .fc.bias.*33 values"),
    "an error of other length": (lambda s: changed(s, DENSE, "error", np.zeros(32)), "saved error has shape"),
    "text in error": (lambda s: changed(s, DENSE, "error", "text"), "saved error of 'fc.bias'"),
    "objects as threshold": (lambda s: changed(s, SPARSE, "threshold", [None, {}]), "threshold of 'fc.weight'"),
    "other length": (lambda s: changed(s, DENSE, "u", np.zeros(7)), "shape"),
    "no u": (lambda s: without(s, "parameters", DENSE, "u"), "no u of 'fc.bias'"),
    "no v": (lambda s: without(s, "parameters", SPARSE, "v"), "sparsified here but was dense"),
    "a list as an entry": (lambda s: {**s, "parameters": {**s["parameters"], DENSE: [1]}}, "no u of 'fc.bias'"),
    "parameters as a list": (lambda s: {**s, "parameters": [1]}, "holds no parameters"),
    "no parameters": (lambda s: without(s, "parameters"), "holds no parameters"),
    "no step": (lambda s: without(s, "step"), "step=None"),
    "a text as step": (lambda s: {**s, "step": "3"}, "step='3'"),
    "a negative step": (lambda s: {**s, "step": -1}, "step=-1"),
    "another format": (lambda s: {**s, "format": 2}, "format 2"),
    "a text as size": (lambda s: {**s, "size": "2"}, "size='2'"),
    "no ranks": (lambda s: {**s, "size": 0}, "size=0"),
    "a missing parameter": (lambda s: without(s, "parameters", DENSE), "lacks parameter 'fc.bias'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_state_is_refused_before_anything_is_changed(name):
    make, text = BAD[name]

    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank))
        before = exchange.state_dict()
        with pytest.raises(LayoutError, match=text):
            exchange.load_state_dict(make(before))
        after = exchange.state.to_dict()
        for parameter, entry in before["parameters"].items():
            for key, values in entry.items():
                np.testing.assert_array_equal(after["parameters"][parameter][key], values)

    on_ranks(2, steps, sparsity=0.9, small="int8")


@pytest.mark.parametrize("key", ["u", "v", "error"])
def test_a_value_that_is_infinite_in_the_type_that_holds_it_is_refused(key):
    """It is finite in the saved type."""
    name = DENSE if key == "error" else SPARSE

    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank))
        before = exchange.state_dict()
        values = np.zeros(before["parameters"][name]["u"].size, np.float64)
        values[3] = 1e300
        with pytest.raises(LayoutError, match=rf"the saved {key} of {name!r} holds 1 values that are not"):
            exchange.load_state_dict(changed(before, name, key, values))
        np.testing.assert_array_equal(
            exchange.state.to_dict()["parameters"][name]["u"], before["parameters"][name]["u"]
        )

    on_ranks(2, steps, sparsity=0.9, small="int8")


def test_a_state_in_float64_is_held_in_float64_where_the_parameter_is():
    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank, dtype="float64"))
        saved = changed(exchange.state_dict(), DENSE, "u", np.full(33, 1e300))
        exchange.load_state_dict(saved)
        return exchange.state.to_dict()["parameters"][DENSE]["u"][0]

    assert on_ranks(2, steps, dtype="float64", sparsity=0.9, momentum=0.9) == [1e300] * 2
