"""Checks of arguments. Each raises a :class:`~dgc.errors.ConfigError` that says which values are allowed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from dgc.errors import ConfigError

_LONGEST_SHOWN = 80  # characters of a value in an error


def plain(value: object) -> Any:
    """Turn NumPy scalars into Python's numbers, even inside a list or tuple; return other values unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, (np.number, np.bool_)) else value


def brief(value: object) -> str:
    """Return a value's ``repr`` for an error, or its class if the ``repr`` is long or has several lines."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN and "\n" not in text else f"an object of class {type(value).__name__}"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float. True and False are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    """Require a finite number from ``low`` to ``high``. With ``low_open`` or ``high_open`` that end is not allowed."""
    if value is None and optional:
        return
    fits = is_number(value) and low <= value <= min(high, sys.float_info.max)
    if not fits or (low_open and value == low) or (high_open and value == high):
        span = f"{'(' if low_open else '['}{low}, {high}{')' if high_open or high == math.inf else ']'}"
        raise ConfigError(f"{name} is {brief(value)}; allowed: a number in {span}{' or None' if optional else ''}")


def require_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Require True or False."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise ConfigError(
            f"{name} is {brief(value)}; allowed: {'True, False or None' if optional else 'True or False'}"
        )


def require_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Require a whole number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f">= {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} is {brief(value)}; allowed: a whole number {span}")


def require_choice(name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Require one of ``choices``."""
    if not any(type(value) is type(c) and value == c for c in choices):
        raise ConfigError(f"{name} is {brief(value)}; allowed: {', '.join(repr(c) for c in choices)}")


def as_sparsities(value: object) -> tuple[float, ...]:
    """Return the option ``sparsity``, one number or a list of them, as a tuple."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    values = (value,) if is_number(value) else value
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
        raise ConfigError(f"sparsity is {value!r}; give a number in [0, 1) or a non-empty list of such numbers")
    for s in values:
        if not is_number(s) or not 0.0 <= s < 1.0:
            raise ConfigError(
                f"sparsity contains {s!r}; each must be in [0, 1): 0.999 holds back 99.9 % and sends 0.1 %"
            )
    return tuple(float(s) for s in values)


def as_patterns(name: str, value: object) -> tuple[str, ...]:
    """Return name patterns, one text or a list of them, as a tuple."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(p, str) for p in values):
        raise ConfigError(f"{name} is {value!r}; give name patterns such as ('*.bias', 'embedding.*')")
    return tuple(values)


def as_loss_scale(value: object, scaler: str = "loss scaler") -> float | Callable[[], float]:
    """Return the option ``loss_scale``: a number > 0, or a function that returns one.

    Args:
        value: the user's value.
        scaler: the framework's loss scaler class, which is also allowed; the error names it.
    """
    if callable(value):
        scale: Callable[[], float] = value
        return scale
    if is_number(value) and value > 0:
        return float(value)
    raise ConfigError(f"loss_scale is {brief(value)}; give a number > 0, a function that returns one, or the {scaler}")


def require_compressor(value: object) -> None:
    """Require a compressor in Horovod's sense, an object with ``compress`` and ``decompress``, or None."""
    if value is not None and not (hasattr(value, "compress") and hasattr(value, "decompress")):
        raise no_compressor(value)


def no_compressor(value: object) -> ConfigError:
    """Return the error about a value that is not a compressor, such as a constructor that was not called."""
    name = value if isinstance(value, str) else getattr(value, "__name__", "dgc")
    name = name if str(name).isidentifier() and not isinstance(value, type) else "dgc"
    return ConfigError(
        f"compression is {brief(value)}, which is no compressor; call one: compression=Compression.{name}(), or leave "
        "it out for no compression"
    )


def require_unused(
    what: str, name: object, number: object, *, numbers: range, reserved: Collection[str], taken: Mapping[str, int]
) -> None:
    """Require that the name and number of a new codec or compressor are valid and not in use.

    Args:
        what: "codec" or "compressor", for the error.
        name: its name in options.
        number: its number in headers.
        numbers: the numbers that are allowed.
        reserved: names that are not allowed.
        taken: the names and numbers that exist already.
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
