"""Checks that option dataclasses share: what was given, what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from dgc.errors import ConfigError

_BRIEF = 80
"""Characters of a value in an error."""


def plain(value: object) -> Any:
    """A NumPy scalar as Python's own number, also inside a list or tuple; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, (np.number, np.bool_)) else value


def brief(value: object) -> str:
    """The value in an error's sentence: its ``repr``, or its class where that is no short line."""
    text = repr(value)
    return text if len(text) <= _BRIEF and "\n" not in text else f"an object of class {type(value).__name__}"


def require_number(
    name: str,
    value: object,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    optional: bool = False,
) -> None:
    """Require a finite number between ``low`` and ``high``, either end left out where it is open.

    Raises:
        ConfigError: it is not; the message says what is allowed.
    """
    if value is None and optional:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value <= high
        or not _is_finite(value)
        or (low_open and value == low)
        or (high_open and value == high)
    ):
        span = f"{'(' if low_open else '['}{low}, {high}{')' if high_open or high == math.inf else ']'}"
        raise ConfigError(f"{name} is {brief(value)}; allowed: a number in {span}{' or None' if optional else ''}")


def require_flag(name: str, value: object) -> None:
    """Require True or False.

    Raises:
        ConfigError: something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {brief(value)}; allowed: True or False")


def require_integer(name: str, value: object, low: int) -> None:
    """Require a whole number of at least ``low``.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {brief(value)}; allowed: a whole number >= {low}")


def require_choice(name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Require one of ``choices``.

    Raises:
        ConfigError: it is not; the message lists them.
    """
    if not any(type(value) is type(c) and value == c for c in choices):
        raise ConfigError(f"{name} is {brief(value)}; allowed: {', '.join(repr(c) for c in choices)}")


def require_compressor(value: object) -> None:
    """Require what Horovod calls a compressor: anything with ``compress`` and ``decompress``, or None.

    Raises:
        ConfigError: something else, such as ``Compression.dgc`` without parentheses or its name as a text.
    """
    if value is not None and not (hasattr(value, "compress") and hasattr(value, "decompress")):
        raise no_compressor(value)


def no_compressor(value: object) -> ConfigError:
    """The error about a value in a compressor's place, such as a class or a constructor that was not called."""
    name = value if isinstance(value, str) else getattr(value, "__name__", "dgc")
    name = name if str(name).isidentifier() and not isinstance(value, type) else "dgc"
    return ConfigError(
        f"compression is {brief(value)}, which is no compressor; call one: compression=Compression.{name}(), or leave "
        "it out for no compression"
    )


def require_unused(
    what: str, name: object, number: object, *, numbers: range, reserved: Collection[str], taken: Mapping[str, int]
) -> None:
    """Require a name for options, and a number for headers out of ``numbers``, that nothing in ``taken`` has.

    Raises:
        ConfigError: they are taken, or not allowed.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in reserved:
        raise ConfigError(f"a {what} cannot be named {name!r}; give it a Python name of its own")
    if number not in numbers:
        raise ConfigError(f"{what} {name!r} has number {number}; allowed: {numbers[0]} to {numbers[-1]}")
    for other, its in taken.items():
        if other == name or its == number:
            raise ConfigError(
                f"{what} {name!r} with number {number} collides with {other!r}, which has number {its}; names and "
                "numbers must be unique"
            )


def as_loss_scale(value: object, scaler: str = "loss scaler") -> float | Callable[[], float]:
    """A number > 0 or a function that returns one; ``scaler`` is what else the framework allows, for the error.

    Raises:
        ConfigError: something else.
    """
    if callable(value):
        scale: Callable[[], float] = value
        return scale
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise ConfigError(f"loss_scale is {brief(value)}; give a number > 0, a function that returns one, or the {scaler}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
