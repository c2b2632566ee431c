"""u, v and the step: saved, loaded, resized; states that are none, damaged, or of no moment between two steps."""

import copy
import math
import re

import numpy as np
import pytest
from exchange_tools import gradients, on_ranks, run_step, train

from dgc.core.saved import resized
from dgc.errors import LayoutError


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (3, 2), (2, 3), (1, 2)])
@pytest.mark.parametrize(("op", "begin"), [("average", 0), ("sum", 0), ("sum", 100)])
@pytest.mark.parametrize("small", ["float32", "int8"])
def test_resizing_keeps_the_mean_or_the_sum_of_residuals_and_momentum(old, new, op, begin, small):
    out = train(old, 8, sparsity=0.95, momentum=0.9, op=op, rampup_begin_step=begin, small=small)
    states = [e.state.to_dict()["parameters"] for _, e in out]
    fresh = [resized([e.state.to_dict() for _, e in out], r, new, begin, op=op)["parameters"] for r in range(new)]
    assert any("error" in entry for entry in states[0].values()) is (small == "int8" and begin == 0)
    for name, entry in states[0].items():
        for key in entry.keys() - {"threshold"}:
            if key == "u" and "v" not in entry:
                for s in fresh:
                    np.testing.assert_array_equal(s[name][key], entry[key])
                continue
            total = np.mean if op == "average" else np.sum
            before, after = (total([s[name][key] for s in each], axis=0) for each in (states, fresh))
            np.testing.assert_allclose(after, before, atol=1e-6 if op == "average" else 1e-5)


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

    on_ranks(2, steps, sparsity=0.9)


@pytest.mark.parametrize("key", ["u", "v", "error", "w", "v + w", "error + w"])
def test_a_value_that_is_infinite_in_the_type_that_holds_it_is_refused(key):
    """It is finite in the saved type, or each of two is that a rank adds up."""
    name = DENSE if "error" in key else SPARSE

    def steps(exchange, rank):
        run_step(exchange, gradients(0, rank))
        before = exchange.state_dict()
        saved, parts = before, key.split(" + ")
        for part in parts:
            values = np.zeros(before["parameters"][name]["u"].size, np.float64)
            values[3] = 1e300 if len(parts) == 1 else 3e38
            saved = changed(saved, name, part, values)
        with pytest.raises(LayoutError, match=rf"the saved {re.escape(key)} of {name!r} holds 1 values that are not"):
            exchange.load_state_dict(saved)
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


def test_a_loaded_state_without_thresholds_forgets_those_of_before():
    """As after a resize: they are each old rank's own."""
    (_, exchange), _ = train(2, 4, sparsity=0.95)
    for bucket in exchange.state.buckets:
        bucket.thresholds[...] = 1.0
    exchange.state.load(resized([exchange.state.to_dict()] * 2, 0, 2, 0))
    assert all(np.isnan(bucket.thresholds).all() for bucket in exchange.state.buckets)


def test_a_reset_forgets_the_thresholds_too():
    """Those of the run before would select too few entries of residuals that begin at 0 again."""

    def reset(exchange, rank):
        for bucket in exchange.state.buckets:
            bucket.thresholds[...] = 1.0
        exchange.reset()
        return np.concatenate([bucket.thresholds.ravel() for bucket in exchange.state.buckets])

    for fresh in on_ranks(2, reset, sparsity=0.9):
        assert fresh.size
        assert np.isnan(fresh).all()
