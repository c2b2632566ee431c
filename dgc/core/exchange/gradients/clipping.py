"""Local gradient clipping: before accumulation, on each rank's own gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.exchange.records import StepContext
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Bucket


def clip_factors(sums_of_squares: np.ndarray, threshold: float, ranks: int, scale: float = 1.0) -> list[float]:
    """Factors that bring each gradient's L2 norm to at most ``threshold * sqrt(ranks)``.

    The paper scales its threshold by N^(-1/2) for gradients already divided by N; on an undivided gradient
    that is ``||g|| <= c * sqrt(N)``.

    Args:
        sums_of_squares: (S,) float64 of the gradients as they arrived.
        threshold: c > 0.
        ranks: N.
        scale: what the gradients are multiplied by before the norm counts (1 / loss scale).

    Source: arXiv 1712.01887, section 3.2; Paddle's dgc_clip_by_norm.
    """
    limit = threshold * math.sqrt(ranks)
    # S is small, and the caches hold gradients: half a dozen NumPy calls would take longer.
    return [limit / n if (n := math.sqrt(s) * scale) > limit else 1.0 for s in sums_of_squares.tolist()]


class Clipping:
    """Fills in a step's clipping factors, bucket by bucket or at once."""

    def __init__(self, config: DGCConfig, kernels: Kernels, ranks: int) -> None:
        """Keep what the factors depend on: ``local_grad_clip_norm``, ``clip_scope``, and the number of ranks N."""
        self._threshold = config.local_grad_clip_norm
        self._kernels = kernels
        self._ranks = ranks
        self.needs_all_gradients = self._threshold is not None and config.clip_scope == "global"
        """Whether one norm is taken over all gradients, so that no bucket may start before all are in."""

    def fill_in(self, step: StepContext, buckets: Iterable[Bucket]) -> None:
        """Clip the gradients of ``buckets``, or once all of them; a dense step is clipped globally or not at all."""
        if self._threshold is None:
            return
        chosen: Iterable[int] = range(len(step.scales))
        if not self.needs_all_gradients:
            if step.density is None:
                return
            chosen = [s.parameter for bucket in buckets for s in bucket.sparse]
        squares = self._kernels.sums_of_squares([step.submissions[i].gradient for i in chosen])
        if self.needs_all_gradients:
            squares = np.full(len(squares), squares.sum())
        factors = clip_factors(squares, self._threshold, self._ranks, 1.0 / step.loss_scale)
        for i, factor in zip(chosen, factors, strict=True):
            step.scales[i] *= factor
