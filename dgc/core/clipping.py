"""Local gradient clipping: before accumulation, on each rank's own gradient."""

from __future__ import annotations

import math

import numpy as np


def clip_factors(sums_of_squares: np.ndarray, threshold: float, ranks: int, scale: float = 1.0) -> np.ndarray:
    """Factors that bring each gradient's L2 norm to at most ``threshold * sqrt(ranks)``.

    The paper scales its threshold by N^(-1/2) for gradients already divided by N; on an undivided gradient
    that is ``||g|| <= c * sqrt(N)``.

    Args:
        sums_of_squares: (S,) float64 of the gradients as they arrived.
        threshold: c > 0.
        ranks: N.
        scale: what the gradients are multiplied by before the norm counts (1 / loss scale).

    Returns:
        (S,) float64 in (0, 1].

    Source: arXiv 1712.01887, section 3.2; Paddle's dgc_clip_by_norm.
    """
    norms = np.sqrt(sums_of_squares) * scale
    limit = threshold * math.sqrt(ranks)
    return np.where(norms > limit, limit / np.maximum(norms, np.finfo(np.float64).tiny), 1.0)
