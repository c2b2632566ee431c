"""DoReFa-Net's gradients: k bits between -M and M, rounded at random, without bias."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dgc.core.compressors.base import BucketSpec, StepInfo, Tensor, as_scale
from dgc.core.compressors.quantizers.codes import Coded, CodeForm
from dgc.core.config.checks import require_integer, require_number


@dataclass(frozen=True)
class DorefaOptions:
    """Options of ``dorefa``."""

    bits: int = 4
    """k, 1 to 8. The paper finds that fewer than 4 hurt."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_integer("bits", self.bits, 1)
        require_number("bits", self.bits, low=1, high=8)


class Dorefa(Coded):
    """k-bit gradients: unbiased, without error feedback.

    ``f(r) = 2M [quantise_k(r / 2M + 1/2 + noise) - 1/2]`` with ``M = max|r|`` of the tensor, noise uniform in
    ``±1/2 / (2^k - 1)`` and ``quantise_k(z) = round((2^k - 1) z) / (2^k - 1)``. The levels are odd multiples of
    ``M / (2^k - 1)``: zero is none of them, and becomes one of its two neighbours. k bits an element, a float a tensor.

    Departure: the paper quantises the gradients of activations, with an M for each image; here it is those of the
    weights, with one M a tensor.

    Source: Zhou et al. 2016, arXiv 1606.06160, equation 12.
    """

    name = "dorefa"
    number = 9
    source = "Zhou et al. 2016, arXiv 1606.06160"
    bits = "4 (or 1 to 8) + 1 float a tensor"
    error_feedback = False
    unbiased = True
    measures = True
    Options = DorefaOptions
    options: DorefaOptions

    @property
    def _levels(self) -> int:
        return (1 << self.options.bits) - 1

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        return CodeForm("span", self.options.bits, self._levels, scales=1, group=tensor.n)

    def scale(self, tensor: Tensor, index: int, moments: np.ndarray, info: StepInfo) -> tuple[np.float32, float]:  # noqa: D102
        return as_scale(float(moments[:, 0].max())), math.inf

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core.compressors.quantizers import numba_loops as loops

        scale = as_scale(float(np.abs(x).max(initial=0.0)))
        codes = np.empty(tensor.n, np.uint8)
        loops.round_span(x, float(scale), self._levels, info.key(tensor.name), codes)
        return np.array([scale], np.float32), codes

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core.compressors.quantizers import numba_loops as loops

        out = np.empty(tensor.n, np.float32)
        loops.scale_span(codes, scales[0], self._levels, out)
        return out
