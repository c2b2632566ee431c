"""Paddle's regularizers, under both of the names that it gives them, and its refusal of arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dgc.errors import ConfigError

__all__ = ["L1Decay", "L1DecayRegularizer", "L2Decay", "L2DecayRegularizer"]
"""What the frameworks' packages export."""


@dataclass(frozen=True)
class L1Decay:
    """Adds ``regularization_coeff * sign(p)`` to each rank's gradient, after clipping and before momentum."""

    regularization_coeff: float = 0.0


@dataclass(frozen=True)
class L2Decay:
    """Adds ``regularization_coeff * p`` to each rank's gradient, after clipping and before momentum."""

    regularization_coeff: float = 0.0


L1DecayRegularizer = L1Decay
L2DecayRegularizer = L2Decay

Regularizer = L1Decay | L2Decay | None


class ArgumentError(ConfigError, AssertionError):
    """An argument that Paddle refuses with an ``AssertionError``."""


def require(condition: bool, message: str) -> None:
    """Raise an ArgumentError unless ``condition`` holds."""
    if not condition:
        raise ArgumentError(message)


def check_regularizer(value: Any, what: str) -> Regularizer:
    """Return ``value`` if it is a regulariser or None.

    Raises:
        ArgumentError: it is something else, or its coefficient is no finite number >= 0.
    """
    require(
        value is None or isinstance(value, (L1Decay, L2Decay)),
        f"{what} is {value!r}; allowed: None, L1Decay(coefficient) or L2Decay(coefficient)",
    )
    if value is not None:
        coefficient = value.regularization_coeff
        number = isinstance(coefficient, (int, float)) and not isinstance(coefficient, bool)
        require(
            number and math.isfinite(coefficient) and coefficient >= 0,
            f"{what} has the coefficient {coefficient!r}; allowed: a number >= 0",
        )
    checked: Regularizer = value
    return checked


def coefficients(regularizer: Regularizer) -> tuple[float, float]:
    """(L1, L2) coefficients, of which one at most is not 0."""
    coefficient = 0.0 if regularizer is None else float(regularizer.regularization_coeff)
    return (coefficient, 0.0) if isinstance(regularizer, L1Decay) else (0.0, coefficient)
