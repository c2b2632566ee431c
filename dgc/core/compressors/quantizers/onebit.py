"""1-bit SGD: the sign of every entry, and the means of both signs in each column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgc.core.compressors.base import BucketSpec, StepInfo, Tensor
from dgc.core.compressors.quantizers.codes import Coded, CodeForm
from dgc.core.config.checks import require_choice


@dataclass(frozen=True)
class OnebitOptions:
    """Options of ``onebit``."""

    means: str = "column"
    """What shares a pair of means: a "column" of the matrix (first dimension x all others), a "row" of it, or the
    whole "tensor"."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_choice("means", self.means, ("column", "row", "tensor"))


class Onebit(Coded):
    """One bit an entry, with error feedback.

    ``x = g + e``; bit = (x >= 0). In each column the entries of either sign become their mean (0 where there are none),
    and ``e = x - mean``. n bits and two floats a column. A tensor of more than two dimensions counts as a matrix of its
    first dimension x all others. Kernels of convolutions have short columns; ``means="row"`` costs less there.

    Departure: the paper's ranks exchange the sum quantised a second time, with a residual of its own. Here every rank
    receives every message and adds them in full precision, so there is no second quantisation.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", Interspeech.
    """

    name = "onebit"
    number = 6
    source = "Seide et al. 2014, Interspeech"
    bits = "1 + 2 floats a column"
    error_feedback = True
    Options = OnebitOptions

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        shape = self._shape(tensor)
        return CodeForm("sign", 1, 1, scales=2 * shape[1], group=tensor.n, shape=shape)

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core.compressors.quantizers import numba_loops as loops

        shape = self._shape(tensor)
        means, signs = np.empty((2, shape[1]), np.float32), np.empty(tensor.n, np.uint8)
        loops.split_means(np.ascontiguousarray(x).reshape(shape), means, signs)
        np.nan_to_num(means, copy=False)  # a mean beyond float32 becomes its largest number
        return means, signs

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core.compressors.quantizers import numba_loops as loops

        out = np.empty(self._shape(tensor), np.float32)
        loops.spread_means(codes, scales.reshape(2, -1), out)
        return out.reshape(-1)

    def _shape(self, tensor: Tensor) -> tuple[int, int, int]:
        """(outer, columns, inner) such that elements of one column share the middle index."""
        rows = tensor.shape[0] if tensor.shape else 1
        if self.options.means == "tensor":
            return 1, 1, tensor.n
        return (rows, tensor.n // rows, 1) if self.options.means == "column" else (1, rows, tensor.n // rows)
