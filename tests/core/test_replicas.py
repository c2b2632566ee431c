"""Ranks that train different models are told so, all of them; rounding is no difference."""

import numpy as np
import pytest

from dgc.errors import ConfigError
from dgc.transport.agreement import require_replicas, sample_places
from dgc.transport.local import run_ranks


def outcomes(tables):
    def rank(transport):
        require_replicas(transport, tables[transport.rank], "broadcast them")

    return run_ranks(len(tables), rank, return_errors=True)


def model(scale=1.0, **changed):
    values = {"rate": np.array([0.1]), "w": np.arange(8.0), "empty": np.empty(0), "b": np.zeros(3)}
    return {name: value * scale for name, value in values.items()} | changed


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_models_pass(size):
    assert outcomes([model()] * size) == [None] * size


def test_rounding_and_nan_are_no_difference():
    odd = {"b": np.array([np.nan, np.inf, 0.0])}
    assert outcomes([model(**odd), model(1 + 1e-6, **odd)]) == [None] * 2


@pytest.mark.parametrize(
    ("changed", "name", "there"),
    [
        ({"rate": np.array([0.2])}, "rate", "0.2"),
        ({"w": np.arange(8.0)[::-1]}, "w", "7"),
        ({"b": np.array([0.0, 1e-9, 0.0])}, "b", "1e-09"),
        ({"b": np.array([0.0, np.nan, 0.0])}, "b", "nan"),
        ({"b": np.array([0.0, np.inf, 0.0])}, "b", "inf"),
    ],
    ids=["rate", "weights", "small bias", "nan", "inf"],
)
def test_a_difference_is_named_on_every_rank(changed, name, there):
    errors = outcomes([model(), model(), model(**changed), model()])
    assert {type(e) for e in errors} == {ConfigError}
    assert len({str(e) for e in errors}) == 1
    assert f"'{name}'" in str(errors[0])
    assert f"{there} in the same place on rank 2; broadcast them" in str(errors[0])


def test_nothing_to_compare_asks_nobody():
    require_replicas(None, {"empty": np.empty(0)}, "")


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 1000, 2**31])
def test_places_are_spread_over_the_tensor(numel):
    places = sample_places(numel)
    assert places.size == min(numel, 8)
    if numel:
        assert (places[0], places[-1]) == (0, numel - 1)
        assert (np.diff(places) >= 1).all()
