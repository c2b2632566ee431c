"""Ranks that mean different things, or train different models, all get the same error, naming the first difference."""

import math

import numpy as np
import pytest

from dgc.adapter.agreement import agree_or_raise, require_agreement, require_replicas, sample_places
from dgc.errors import ConfigError, LayoutError, RemoteError, TransportError
from dgc.transport.local import local_world, run_ranks


def message_of(descriptions, error=ConfigError, **options):
    """The message that all ranks raise, in an error of class ``error``."""

    def rank(transport):
        require_agreement(transport, descriptions[transport.rank], "options of the compressor", error, **options)

    results = run_ranks(len(descriptions), rank, return_errors=True)
    assert [type(result) for result in results] == [error] * len(descriptions)
    (message,) = {str(result) for result in results}
    return message


EQUAL = {
    "plain": {"momentum": 0.9, "sparsity": [0.75, 0.999], "values": "float16", "clip": None},
    "nan": {"momentum": math.nan},
    "empty": {},
    "numpy": {"momentum": np.float32(0.5), "dtype": np.dtype("float32")},
    "unsortable keys": {"nested": {1: 2, "a": 3}},
    "unicode": {"schicht_ü": "3x3 float32"},
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_descriptions_agree(size, name):
    run_ranks(size, lambda transport: require_agreement(transport, dict(EQUAL[name]), "options"))


def test_agreement_costs_one_small_allgather():
    class Counting:
        def __init__(self, transport):
            self.transport, self.rank, self.size, self.name, self.bytes = transport, transport.rank, 2, "local", []

        def allgather(self, message, out):
            self.bytes.append(message.size)
            self.transport.allgather(message, out)

    def rank(transport):
        counting = Counting(transport)
        require_agreement(counting, {f"layer{i}.weight": "512x512 float32" for i in range(1000)}, "parameters")
        return counting.bytes

    assert run_ranks(2, rank) == [[24], [24]]


def test_a_different_value_names_key_values_and_ranks():
    descriptions = [{"momentum": 0.9, "sparsity": 0.999, "seed": 0} for _ in range(4)]
    descriptions[3] = {"momentum": 0.9, "sparsity": 0.99, "seed": 1}
    message = message_of(descriptions)
    assert message == (
        "options of the compressor differ between ranks: 'sparsity' is 0.999 on ranks 0-2 and 0.99 on rank 3. "
        "Give every rank the same options of the compressor."
    )


DIFFERENT = {
    "the first key of rank 0": ([{"b": 1, "a": 1}, {"a": 2, "b": 2}], "'b' is 1 on rank 0 and 2 on rank 1"),
    "a missing key": (
        [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}],
        "'b' is 2 on ranks 0, 2 and (missing) on rank 1",
    ),
    "an extra key": ([{"a": 1}, {"a": 1, "c": 3}], "'c' is (missing) on rank 0 and 3 on rank 1"),
    "no key": ([{"a": 1}, {}], "'a' is 1 on rank 0 and (missing) on rank 1"),
    "another order": (
        [{"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3, "b": 2}],
        'the order differs, number 1 is "b" on rank 0 and "c" on rank 1',
    ),
    "NaN": ([{"m": math.nan}, {"m": 0.0}], "'m' is NaN on rank 0 and 0.0 on rank 1"),
    "a number and a flag": ([{"m": 1}, {"m": True}], "'m' is 1 on rank 0 and true on rank 1"),
}


@pytest.mark.parametrize(("descriptions", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_the_first_difference_is_named(descriptions, said):
    assert said in message_of(descriptions)


def test_the_given_error_and_advice_are_used():
    message = message_of([{"w": "3x3"}, {"w": "3x4"}], LayoutError, advice="Build the same model everywhere.")
    assert message.endswith('\'w\' is "3x3" on rank 0 and "3x4" on rank 1. Build the same model everywhere.')


def test_long_values_and_many_values_stay_readable():
    assert len(message_of([{"m": "x" * 10_000}, {"m": "y" * 10_000}])) < 700
    assert "4 more values on other ranks" in message_of([{"m": rank} for rank in range(12)])


def agreed(found):
    """What each rank gets whose description is built, or raises, so."""

    def rank(transport):
        def build():
            if isinstance(found[transport.rank], Exception):
                raise found[transport.rank]
            return found[transport.rank]

        return agree_or_raise(transport, build, "options")

    return run_ranks(len(found), rank, return_errors=True)


def test_what_was_built_is_returned_and_compared():
    assert agreed([{"a": 1}, {"a": 1}]) == [{"a": 1}, {"a": 1}]
    assert [type(result) for result in agreed([{"a": 1}, {"a": 2}])] == [ConfigError, ConfigError]


@pytest.mark.parametrize(
    ("own", "kind", "text"),
    [
        (KeyError("layer3.weight"), RemoteError, "rank 1 failed: KeyError: 'layer3.weight'"),
        (LayoutError("'w' has no gradient"), LayoutError, "rank 1: 'w' has no gradient"),
    ],
    ids=["another error", "an error of this package"],
)
def test_a_rank_that_fails_raises_its_own_error_and_the_others_name_it(own, kind, text):
    results = agreed([{"a": 1}, own, {"a": 1}])
    assert results[1] is own
    assert [(type(result), str(result)) for result in (results[0], results[2])] == [(kind, text)] * 2


def test_every_rank_that_fails_raises_its_own_error():
    errors = [ValueError("same"), ValueError("same"), TypeError("other")]
    assert all(result is error for result, error in zip(agreed(errors), errors, strict=True))
    assert not any(hasattr(error, "__notes__") for error in errors)


def test_a_broken_transport_does_not_hide_the_error_itself():
    def cut(message, out):
        raise TransportError("cable cut")

    (broken,) = local_world(1)
    broken.allgather = cut
    with pytest.raises(ZeroDivisionError) as caught:
        agree_or_raise(broken, lambda: {"a": 1 / 0})
    assert caught.value.__notes__ == ["and this could not be reported to the other ranks: cable cut"]


def outcomes(tables, sums=None, **options):
    def rank(transport):
        own = {} if sums is None else {"sums": sums[transport.rank]}
        require_replicas(transport, tables[transport.rank], "broadcast them", **own, **options)

    return run_ranks(len(tables), rank, return_errors=True)


def model(scale=1.0, **changed):
    values = {"rate": np.array([0.1]), "w": np.arange(8.0), "empty": np.empty(0), "b": np.zeros(3)}
    return {name: value * scale for name, value in values.items()} | changed


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_models_pass(size):
    assert outcomes([model()] * size) == [None] * size


def test_nan_is_no_difference():
    odd = {"b": np.array([np.nan, np.inf, 0.0])}
    assert outcomes([model(**odd), model(**odd)]) == [None] * 2


@pytest.mark.parametrize(("tolerance", "passes"), [(0.0, False), (1e-7, False), (1e-5, True)])
def test_rounding_is_a_difference_unless_it_is_tolerated(tolerance, passes):
    errors = outcomes([model(), model(1 + 1e-6)], tolerance=tolerance)
    assert errors == [None] * 2 if passes else all("'rate' has the value 0.1 on rank 0" in str(e) for e in errors)


def test_a_difference_that_a_sum_alone_shows_is_one():
    errors = outcomes([model()] * 3, sums=[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5]])
    assert all("'b' has other values on rank 2 than on rank 0; broadcast them" in str(e) for e in errors)


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
