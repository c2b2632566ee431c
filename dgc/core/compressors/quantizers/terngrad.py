"""TernGrad: every entry becomes -s, 0 or s at random, without bias, with one s for all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dgc.core.compressors.base import BucketSpec, StepInfo, Tensor, as_scale
from dgc.core.compressors.quantizers.codes import Coded, CodeForm, magnitude_and_deviation, tiles_of
from dgc.core.config.checks import require_number
from dgc.core.config.config import DGCConfig

CONSTANT = 1e-9
"""A deviation below this share of the largest magnitude is rounding; clipping to it would send nothing."""


@dataclass(frozen=True)
class TerngradOptions:
    """Options of ``terngrad``."""

    clip_factor: float | None = 2.5
    """Entries are cut at so many standard deviations of their tensor; None: not at all."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_number("clip_factor", self.clip_factor, low=0.0, low_open=True, high=1e6, optional=True)


class Terngrad(Coded):
    """Ternary gradients: unbiased (of the clipped gradient), without error feedback.

    Of each tensor: cut at ``±c σ`` with ``σ² = mean((g - mean g)²)``, not where σ = 0; ``s = max|g|`` of all ranks
    ("scaler sharing": one small allreduce before the exchange); ``q = s * sign(g) * b`` with b = 1 with probability
    ``|g| / s``. Five entries a byte, 1.6 bits each, and a float a tensor.

    Departures: five entries a byte instead of four. Which layers are left out is up to ``exclude``.

    Source: Wen et al. 2017, arXiv 1705.07878, Algorithm 1 and sections 3.2 and 3.3.
    """

    name = "terngrad"
    number = 8
    source = "Wen et al. 2017, arXiv 1705.07878"
    bits = "1.6 + 1 float a tensor"
    error_feedback = False
    unbiased = True
    shares = True
    measures = True
    Options = TerngradOptions

    def __init__(self, config: DGCConfig) -> None:
        """Begin with no tensor prepared."""
        super().__init__(config)
        self._limits: dict[str, float] = {}

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        return CodeForm("signed", 0, 1, scales=1, group=tensor.n)

    def prepare(self, x: np.ndarray, spec: BucketSpec) -> np.ndarray:
        """Each tensor's largest magnitude after clipping."""
        return np.array([self.measured(t, _moments(x[t.slice])) for t in spec.tensors])

    def measured(self, tensor: Tensor, moments: np.ndarray) -> float:
        """The largest magnitude after clipping; where it is cut is kept for :meth:`scale`."""
        largest, self._limits[tensor.name] = self._extent(moments, tensor.n)
        return min(largest, self._limits[tensor.name])

    def scale(self, tensor: Tensor, index: int, moments: np.ndarray, info: StepInfo) -> tuple[np.float32, float]:  # noqa: D102
        limit = self._limits.pop(tensor.name, None)
        if limit is None:
            limit = self._extent(moments, tensor.n)[1]
        return as_scale(float(info.shared[index])), limit

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core.compressors.quantizers import numba_loops as loops

        measured = np.empty((0, 3)) if tensor.name in self._limits else _moments(x)
        scale, limit = self.scale(tensor, spec.tensors.index(tensor), measured, info)
        scales, codes = np.array([scale], np.float32), np.empty(tensor.n, np.uint8)
        loops.round_signed(x, scales, tensor.n, limit, 1, info.key(tensor.name), codes)
        return scales, codes

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core.compressors.quantizers import numba_loops as loops

        out = np.empty(tensor.n, np.float32)
        loops.scale_signed(codes, scales, tensor.n, 1, out)
        return out

    def _extent(self, moments: np.ndarray, n: int) -> tuple[float, float]:
        """A tensor's largest magnitude, and where it is cut."""
        largest, deviation = magnitude_and_deviation(moments, n)
        factor = self.options.clip_factor
        if deviation <= CONSTANT * largest:  # rounding leaves a trace of deviation in a constant float64 tensor
            deviation = 0.0
        return largest, math.inf if factor is None else factor * deviation or math.inf


def _moments(x: np.ndarray) -> np.ndarray:
    from dgc.core.compressors.quantizers import numba_loops as loops

    found = np.empty((tiles_of(x.size), 3))
    loops.moments(x, found)
    return found
