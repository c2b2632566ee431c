"""States as users hand them over, without a framework."""

import copy

import numpy as np
import pytest
from test_compressor import Compressor

from dgc.core.saved import require_states
from dgc.errors import LayoutError
from dgc.transport.local import run_ranks


@pytest.mark.parametrize(
    ("state", "resize", "text"),
    [
        (None, False, "got None; give it what state_dict"),
        (None, True, "got None"),
        (3, False, "got a int"),
        ("state.pt", True, "got a str"),
        (np.zeros(3), False, "got a ndarray"),
        ([], True, "got 0 states"),
        ([None, {}], True, "None as the state of old rank 0"),
        ([{}, 5], True, "a int as the state of old rank 1"),
    ],
)
@pytest.mark.parametrize("bound", [False, True])
def test_what_is_no_state_is_refused_before_and_after_binding(state, resize, text, bound):
    with pytest.raises(LayoutError, match=text):
        require_states(state, resize)

    def one_rank(transport):
        compressor = Compressor(transport)
        if bound:
            compressor.bind()
        with pytest.raises(LayoutError, match=text):
            compressor.load_state_dict(state, resize)
        assert compressor.state_dict()["step"] == 0
        if bound:
            compressor.close()

    run_ranks(2, one_rank)


def trained(transport, steps=1):
    compressor = Compressor(transport)
    compressor.bind()
    for step in range(steps):
        compressor.engine.step(step)
    return compressor


def test_no_rank_changes_anything_when_one_cannot_load():
    def one_rank(transport):
        other = trained(transport, 2)
        state = other.state_dict()
        other.engine.close(keep_transport=True)
        compressor = trained(transport)
        before = compressor.residual_norm
        damaged = copy.deepcopy(state)
        damaged["parameters"]["b"]["v"] = damaged["parameters"]["b"]["v"][:-1]
        spoiled = copy.deepcopy(state)
        spoiled["parameters"]["b"]["u"][0] = np.nan
        foreign = [{**state, **other} for other in ({"step": 9}, {"size": 4}, {"rank": 1 - transport.rank})]
        for bad in (damaged, spoiled, [state], *foreign, None):
            with pytest.raises(LayoutError):
                compressor.load_state_dict(bad if transport.rank else state)
            assert compressor.residual_norm == before
            assert compressor.state_dict()["step"] == 1
        compressor.load_state_dict(state)
        assert compressor.state_dict()["step"] == 2

    run_ranks(2, one_rank)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda states: states[::-1], "index 0 belongs to rank 1 of 2"),
        (lambda states: [states[0], states[0]], "index 1 belongs to rank 0 of 2"),
        (lambda states: [states[0], {**states[1], "step": 5}], "saved its state in step 5, rank 0 in step 1"),
        (lambda states: [states[0], {**states[1], "parameters": {"a": {}}}], "another model"),
        (lambda states: [states[0], {**states[1], "parameters": 3}], "no parameters"),
        (lambda states: [states[0], None], "needs the state of old rank 1"),
        (lambda states: [states[0]] * 3, "all 2 old ranks"),
    ],
)
def test_states_that_were_not_saved_together_are_not_added_up(change, text):
    states = run_ranks(2, lambda transport: trained(transport).state_dict())

    def one_rank(transport):
        compressor = trained(transport)
        before = compressor.residual_norm
        with pytest.raises(LayoutError, match=text):
            compressor.load_state_dict(change(states), resize=True)
        assert compressor.residual_norm == before
        compressor.close()

    run_ranks(1, one_rank)
