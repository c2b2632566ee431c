"""Checks of options: what is allowed at either end, and that a refusal says it."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from dgc.core import config as checks
from dgc.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.True_, True),
        ([np.float32(0.5), (np.int8(1), "a")], [0.5, (1, "a")]),
        ((), ()),
        (None, None),
    ],
)
def test_numpys_scalars_become_pythons(given, expected):
    found = checks.plain(given)
    assert found == expected
    assert type(found) is type(expected)


def test_what_is_no_number_stays_the_same_object():
    named = SimpleNamespace()
    array = np.ones(2)
    assert checks.plain(named) is named
    assert checks.plain(array) is array


@pytest.mark.parametrize("closed", [True, False])
def test_an_open_end_is_left_out_and_a_closed_one_is_in(closed):
    ends = {"low": 0.0, "high": 1.0, "low_open": not closed, "high_open": not closed}
    checks.require_number("x", 0.5, **ends)
    for end in (0.0, 1.0, 0, 1):
        if closed:
            checks.require_number("x", end, **ends)
        else:
            with pytest.raises(ConfigError, match=rf"^x is {end}; allowed: a number in \(0.0, 1.0\)$"):
                checks.require_number("x", end, **ends)


@pytest.mark.parametrize(
    "value", [np.nextafter(0, -1), np.nextafter(1, 2), np.nan, np.inf, -np.inf, True, "1", [1], None]
)
def test_what_is_not_between_the_ends_is_refused(value):
    with pytest.raises(ConfigError, match=r"a number in \[0, 1\]$"):
        checks.require_number("x", value, low=0, high=1)


def test_none_is_allowed_where_it_is_said():
    checks.require_number("x", None, low=0, optional=True)
    with pytest.raises(ConfigError, match=re.escape("x is -1; allowed: a number in [0, inf) or None")):
        checks.require_number("x", -1, low=0, optional=True)


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.True_])
def test_a_flag_is_true_or_false_and_nothing_like_it(value):
    with pytest.raises(ConfigError, match="allowed: True or False"):
        checks.require_flag("x", value)
    checks.require_flag("x", True)
    checks.require_flag("x", False)


@pytest.mark.parametrize("value", [1, 2.0, True, "2", None])
def test_a_whole_number_below_the_least_or_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match=f"^x is {value!r}; allowed: a whole number >= 2$"):
        checks.require_integer("x", value, 2)
    checks.require_integer("x", 2, 2)


@pytest.mark.parametrize("value", [1, 1.0, "b", None, False])
def test_a_choice_is_compared_by_value_and_type(value):
    """``1 == True``, and still 1 was not offered."""
    with pytest.raises(ConfigError, match=r"allowed: 'a', True$"):
        checks.require_choice("x", value, ("a", True))
    checks.require_choice("x", True, ("a", True))


def test_a_choice_that_is_an_array_is_refused_and_not_compared():
    with pytest.raises(ConfigError, match=r"allowed: 'a'$"):
        checks.require_choice("x", np.zeros(2), ("a",))


def factory():
    """Stands for ``Compression.qsgd`` without parentheses."""


factory.__name__ = "qsgd"


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("topk", "Compression.topk()"),
        (factory, "Compression.qsgd()"),
        (SimpleNamespace, "Compression.dgc()"),
        (3, "Compression.dgc()"),
        ("not a name", "Compression.dgc()"),
    ],
)
def test_what_is_no_compressor_is_refused_with_the_call_that_makes_one(value, advice):
    with pytest.raises(ConfigError, match=re.escape(f"call one: compression={advice}, or leave it out")):
        checks.require_compressor(value)


def test_horovods_own_compressors_are_compressors():
    checks.require_compressor(None)
    checks.require_compressor(type("Fp16", (), {"compress": None, "decompress": None}))


@pytest.mark.parametrize("value", [0, -1, True, "2", None, float("nan")])
def test_a_loss_scale_is_positive_or_a_function(value):
    with pytest.raises(ConfigError, match=r"a function that returns one, or the GradScaler$"):
        checks.as_loss_scale(value, "GradScaler")


def test_a_loss_scale_is_handed_on():
    assert type(checks.as_loss_scale(2)) is float
    assert checks.as_loss_scale(factory) is factory
