"""States as users hand them over, without a framework."""

import copy

import numpy as np
import pytest
from test_compressor import Compressor

from dgc.core.saved import digest
from dgc.errors import LayoutError
from dgc.transport.local import run_ranks


@pytest.mark.parametrize(("state", "text"), [(None, "None"), (3, "a int"), ("state.pt", "a str"), ([{}], "a list")])
@pytest.mark.parametrize("bound", [False, True])
def test_what_is_no_state_is_refused_before_and_after_binding(state, text, bound):
    def one_rank(transport):
        compressor = Compressor(transport)
        if bound:
            compressor.bind()
        with pytest.raises(LayoutError, match=f"load_state_dict got {text}; give it the result of state_dict"):
            compressor.load_state_dict(state)
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


def test_a_state_is_that_of_all_ranks_after_an_average_and_before_the_next_step():
    def one_rank(transport):
        compressor = trained(transport)
        own = compressor.state_dict(own=True)
        with pytest.raises(
            LayoutError,
            match=r"the ranks differ in what .* call compression.average\(optimizer\) on all",
        ):
            compressor.state_dict()
        compressor.average()  # for an evaluation: it changes no residual
        assert digest(compressor.state_dict(own=True)) == digest(own)
        compressor.average("the optimizer")
        state = compressor.state_dict()
        compressor.load_state_dict(state)
        assert digest(compressor.state_dict()) == digest(state)
        compressor.engine.step(1)
        with pytest.raises(LayoutError, match="the ranks differ in what they have not sent"):
            compressor.state_dict()
        return digest(own), digest(state)

    (own, shared), (other, same) = run_ranks(2, one_rank)
    assert own != other
    assert shared == same


def test_no_rank_changes_anything_when_one_cannot_load():
    def one_rank(transport):
        other = trained(transport, 2)
        other.average("the optimizer")
        state = other.state_dict()
        other.engine.close(keep_transport=True)
        compressor = trained(transport)
        before = compressor.residual_norm
        damaged = copy.deepcopy(state)
        damaged["parameters"]["b"]["v"] = damaged["parameters"]["b"]["v"][:-1]
        spoiled, another = copy.deepcopy(state), copy.deepcopy(state)
        spoiled["parameters"]["b"]["u"][0] = np.nan
        another["parameters"]["b"]["v"][0] += 1
        for bad in (damaged, spoiled, another, [state], {}, {**state, "step": 9}, {**state, "op": "sum"}, None):
            with pytest.raises(LayoutError):
                compressor.load_state_dict(bad if transport.rank else state)
            assert compressor.residual_norm == before
            assert compressor.state_dict(own=True)["step"] == 1
        compressor.load_state_dict({**state, "size": 5})
        assert compressor.state_dict()["step"] == 2

    run_ranks(2, one_rank)
