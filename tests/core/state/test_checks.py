"""A saved state that is none, is damaged, or is not of a moment between two steps."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from exchange_tools import first_gradients, gradient, make_exchange, parameters, run_step

from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.transport.local import run_ranks

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
    "text in u": (lambda s: changed(s, DENSE, "u", "much"), "no numbers"),
    "ragged u": (lambda s: changed(s, DENSE, "u", [[1.0], [1.0, 2.0]]), "no array"),
    "objects as threshold": (lambda s: changed(s, SPARSE, "threshold", [None, {}]), "threshold of 'fc.weight'"),
    "other length": (lambda s: changed(s, DENSE, "u", np.zeros(7)), "shape"),
    "no u": (lambda s: without(s, "parameters", DENSE, "u"), "no u of 'fc.bias'"),
    "no v": (lambda s: without(s, "parameters", SPARSE, "v"), "sparsified here but was dense"),
    "a list as an entry": (lambda s: {**s, "parameters": {**s["parameters"], DENSE: [1]}}, "no u of 'fc.bias'"),
    "parameters as a list": (lambda s: {**s, "parameters": [1]}, "holds no parameters"),
    "no parameters": (lambda s: without(s, "parameters"), "holds no parameters"),
    "no step": (lambda s: without(s, "step"), "step None"),
    "a text as step": (lambda s: {**s, "step": "3"}, "step '3'"),
    "a negative step": (lambda s: {**s, "step": -1}, "step -1"),
    "another format": (lambda s: {**s, "format": 2}, "format 2"),
    "a missing parameter": (lambda s: without(s, "parameters", DENSE), "lacks parameter 'fc.bias'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_state_is_refused_before_anything_is_changed(name):
    make, text = BAD[name]

    def rank(transport):
        exchange = make_exchange(transport, sparsity=0.9)
        run_step(exchange, first_gradients(transport.rank))
        before = exchange.state_dict()
        with pytest.raises(LayoutError, match=text):
            exchange.load_state_dict(make(before))
        after = exchange.state.to_dict()
        for parameter, entry in before["parameters"].items():
            for key, values in entry.items():
                np.testing.assert_array_equal(after["parameters"][parameter][key], values)
        exchange.close()

    run_ranks(2, rank)


def failed(transport, **options):
    """An exchange of which a step has failed, and its state from before that step."""
    exchange = make_exchange(transport, sparsity=0.9, momentum=0.9, **options)
    for step in range(2):
        run_step(exchange, [gradient(step, transport.rank, i, p.numel) for i, p in enumerate(parameters())])
    before = exchange.state_dict()
    if transport.rank == 1:
        with pytest.raises(DGCError):
            exchange.fail(ConfigError("something is wrong"))
    else:
        with pytest.raises(DGCError):
            run_step(exchange, [gradient(2, transport.rank, i, p.numel) for i, p in enumerate(parameters())])
    return exchange, before


def test_a_state_with_half_a_failed_step_is_not_saved():
    def rank(transport):
        exchange, _ = failed(transport)
        with pytest.raises(
            LayoutError, match=r"state_dict\(\) was called after a step that failed \(.*something is wrong"
        ):
            exchange.state_dict()
        exchange.reset()
        assert exchange.state_dict()["step"] == 0
        exchange.close()

    run_ranks(2, rank)
