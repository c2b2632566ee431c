"""Adam's first moment as the compressor's u."""

from __future__ import annotations

_SETTLED = 1e-9
"""``beta1**t`` below which u needs no correction any more."""


def is_settled(beta1: float, t: int) -> bool:
    """Whether :func:`running_mean` gives the same from step ``t`` on."""
    return beta1**t < _SETTLED


def running_mean(beta1: float, t: int) -> tuple[float, float]:
    """Momentum and gain of step ``t`` (from 1) with which u stays Adam's first moment, its bias corrected.

    ``u <- a*u + (1 - a)*g`` with ``a = beta1 * (1 - beta1**(t-1)) / (1 - beta1**t)`` equals ``m / (1 - beta1**t)``,
    where ``m <- beta1*m + (1 - beta1)*g``.

    Source: Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.
    """
    if is_settled(beta1, t):
        return beta1, 1.0 - beta1
    rest = beta1**t
    # In step 1 nothing of u is left, which to the core's kernels means a momentum, if only a tiny one.
    return max(beta1 * (1.0 - beta1 ** (t - 1)) / (1.0 - rest), 1e-30), (1.0 - beta1) / (1.0 - rest)
