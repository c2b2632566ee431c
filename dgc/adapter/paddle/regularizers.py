"""Paddle's regularizers, under both of the names that it gives them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["L1Decay", "L1DecayRegularizer", "L2Decay", "L2DecayRegularizer"]


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
