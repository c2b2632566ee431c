"""Compressors that send a few bits for every element: ``onebit``, ``qsgd``, ``terngrad``, ``dorefa``.

Letters: n elements of a tensor.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from dgc.core.checks import require_choice, require_integer, require_number
from dgc.core.codecs import loops
from dgc.core.compressors.base import BucketSpec, PerTensor, StepInfo, Tensor, as_scale, put, take_scales
from dgc.core.config import DGCConfig
from dgc.errors import WireError


class Coded(PerTensor):
    """A compressor that sends float32 scales for each tensor, and after them a code for each element."""

    signed: ClassVar[bool] = False  # whether scales may be negative

    def scales(self, tensor: Tensor) -> int:
        """Return how many scales a tensor has."""
        return 1

    def code_bits(self) -> int:
        """Return the number of bits in a code, 1 to 8; 0 means that a byte holds five codes, each 0, 1 or 2."""
        bits: int = self.options.bits
        return bits

    @abstractmethod
    def quantise(
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return float32 scales and (n,) uint8 codes of a tensor; arguments as for :meth:`encode_tensor`."""

    @abstractmethod
    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:
        """Decode scales and codes to (n,) float32."""

    @override
    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:
        bits = self.code_bits()
        return 4 * self.scales(tensor) + (-(-tensor.n * bits // 8) if bits else -(-tensor.n // 5))

    @override
    def encode_tensor(self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo) -> int:
        scales, codes = self.quantise(x, tensor, spec, info)
        block, bits = out[put(out, 0, scales) :], self.code_bits()
        if bits:
            loops.packing[bits][0](codes, block)
        else:
            loops.pack_trits(codes, block)
        return tensor.n

    @override
    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> np.ndarray:
        bits, codes = self.code_bits(), np.empty(tensor.n, np.uint8)
        scales = take_scales(data, self.scales(tensor), signed=self.signed)
        block = data[scales.nbytes :]
        if bits:
            loops.packing[bits][1](block, codes)
        elif not loops.unpack_trits(block, codes):
            raise WireError("a byte does not hold five ternary numbers; the message is damaged")
        return self.restore(scales, codes, tensor)


@dataclass(frozen=True)
class OnebitOptions:
    """Options of ``onebit``."""

    # The entries that share a pair of means: a "column" or a "row" of the matrix (first dimension x all others), or the
    # whole "tensor".
    means: Literal["column", "row", "tensor"] = "column"

    def __post_init__(self) -> None:
        require_choice("means", self.means, ("column", "row", "tensor"))


class Onebit(Coded):
    """Send only the sign of each entry, and the mean of each sign, with error feedback.

    ``x = g + e``; bit = (x >= 0). In each column, the mean of the entries with the same bit replaces them (0 if
    there are none), and ``e = x - mean``. A tensor takes n bits and two floats per column. A tensor with more than
    two dimensions counts as a matrix: its first dimension x all others. Kernels of convolutions have short columns;
    ``means="row"`` costs less there.

    Departure: the paper's ranks quantise the sum a second time, with another residual. Here every rank receives
    every message and adds them in full precision.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", Interspeech.
    """

    name = "onebit"
    number = 6
    source = "Seide et al. 2014, Interspeech"
    bits = "1 + 2 floats a column"
    error_feedback = True
    signed = True
    Options = OnebitOptions

    @override
    def scales(self, tensor: Tensor) -> int:
        return 2 * self._shape(tensor)[1]

    @override
    def code_bits(self) -> int:
        return 1

    @override
    def quantise(
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = self._shape(tensor)
        means, signs = np.empty((2, shape[1]), np.float32), np.empty(tensor.n, np.uint8)
        loops.split_means(np.ascontiguousarray(x).reshape(shape), means, signs)
        np.nan_to_num(means, copy=False)  # a mean too large for float32 becomes the largest float32
        return means, signs

    @override
    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:
        out = np.empty(self._shape(tensor), np.float32)
        loops.spread_means(codes, scales.reshape(2, -1), out)
        return out.reshape(-1)

    def _shape(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return (outer, columns, inner): elements of one column have the same middle index."""
        rows = tensor.shape[0] if tensor.shape else 1
        if self.options.means == "tensor":
            return 1, 1, tensor.n
        return (rows, tensor.n // rows, 1) if self.options.means == "column" else (1, rows, tensor.n // rows)


@dataclass(frozen=True)
class QsgdOptions:
    """Options of ``qsgd``."""

    # 2, 4 or 8 bits: s = 1, 7 or 127 levels of each sign.
    bits: Literal[2, 4, 8] = 4
    # The number of elements that share a norm (the paper's bucket).
    bucket_size: int = 512
    # "l2" as in the paper's analysis, or "max" as in its experiments, which gives less variance and fewer zeros.
    norm: Literal["l2", "max"] = "l2"

    def __post_init__(self) -> None:
        require_choice("bits", self.bits, (2, 4, 8))
        require_integer("bucket_size", self.bucket_size, 1)
        require_choice("norm", self.norm, ("l2", "max"))


class Qsgd(Coded):
    """Quantised SGD: round each entry at random to one of a few levels, without bias and without error feedback.

    In each bucket of d elements ``Q(x_i) = norm * sign(x_i) * ξ_i``. With ``a = |x_i| * s / norm``, ξ is
    ``(floor(a) + 1) / s`` with probability ``a - floor(a)``, else ``floor(a) / s``. For the L2 norm its variance is
    at most ``min(d / s², sqrt(d) / s) * norm²``. An element takes ceil(log2(2s + 1)) bits, a bucket one float.

    Departure: codes have a fixed length, unlike the paper's Elias codes, so that ranks need not exchange sizes.

    Source: Alistarh et al. 2017, arXiv 1610.02132.
    """

    name = "qsgd"
    number = 7
    source = "Alistarh et al. 2017, arXiv 1610.02132"
    bits = "4 (or 2, 8) + 1 float a 512"
    error_feedback = False
    unbiased = True
    Options = QsgdOptions
    options: QsgdOptions

    @property
    def _levels(self) -> int:
        return (1 << self.options.bits - 1) - 1

    @override
    def scales(self, tensor: Tensor) -> int:
        return -(-tensor.n // self.options.bucket_size)

    @override
    def quantise(
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        group = self.options.bucket_size
        exact = np.empty(self.scales(tensor))
        # Each norm is at least its group's largest magnitude: magnitudes above the scale would be cut off.
        loops.norms(x, group, self.options.norm == "l2", exact)
        norms = np.minimum(exact, np.finfo(np.float32).max).astype(np.float32)
        codes = np.empty(tensor.n, np.uint8)
        loops.round_signed(x, norms, group, np.inf, self._levels, info.key(tensor.name), codes)
        return norms, codes

    @override
    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:
        out = np.empty(codes.size, np.float32)
        if not loops.scale_signed(codes, scales, self.options.bucket_size, self._levels, out):
            raise WireError("a level is above the largest one; the message is damaged")
        return out


# A deviation below this share of the largest magnitude is a rounding error of a constant tensor, which is not clipped.
CONSTANT = 1e-9


@dataclass(frozen=True)
class TerngradOptions:
    """Options of ``terngrad``."""

    # Entries are clipped at this many standard deviations of their tensor; None: they are not clipped.
    clip_factor: float | None = 2.5

    def __post_init__(self) -> None:
        require_number("clip_factor", self.clip_factor, low=0.0, low_open=True, high=1e6, optional=True)


class Terngrad(Coded):
    """Ternary gradients: -1, 0 or 1 times one scale per tensor, at random, without error feedback.

    Each tensor is clipped at ``±c σ`` with ``σ² = mean((g - mean g)²)``, unless σ = 0. After that, ``s = max|g|``
    over all ranks ("scaler sharing": one small allreduce before the exchange), and ``q = s * sign(g) * b``, where b
    is 1 with the probability ``|g| / s``, else 0. So q equals the clipped gradient on average. A byte holds five
    entries of 1.6 bits; a tensor takes one float.

    Departures: a byte holds five entries instead of four. The option ``exclude`` names the layers that are left
    out.

    Source: Wen et al. 2017, arXiv 1705.07878, Algorithm 1 and sections 3.2 and 3.3.
    """

    name = "terngrad"
    number = 8
    source = "Wen et al. 2017, arXiv 1705.07878"
    bits = "1.6 + 1 float a tensor"
    error_feedback = False
    unbiased = True
    shares = True
    Options = TerngradOptions

    def __init__(self, config: DGCConfig) -> None:
        super().__init__(config)
        self._limits: dict[str, float] = {}

    @override
    def code_bits(self) -> int:
        return 0

    def prepare(self, x: np.ndarray, spec: BucketSpec) -> np.ndarray:
        """Return each tensor's largest magnitude after clipping; store the limits for :meth:`quantise`."""
        found = {t.name: self._measure(x[t.slice]) for t in spec.tensors}
        self._limits.update({name: limit for name, (_, limit) in found.items()})
        return np.array([min(each) for each in found.values()])

    @override
    def quantise(
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        limit = self._limits.pop(tensor.name, None)
        if limit is None:
            _, limit = self._measure(x)
        scales = np.array([as_scale(float(info.shared[spec.tensors.index(tensor)]))], np.float32)
        codes = np.empty(tensor.n, np.uint8)
        loops.round_signed(x, scales, tensor.n, limit, 1, info.key(tensor.name), codes)
        return scales, codes

    @override
    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:
        out = np.empty(tensor.n, np.float32)
        loops.scale_signed(codes, scales, tensor.n, 1, out)
        return out

    def _measure(self, x: np.ndarray) -> tuple[float, float]:
        """Return a tensor's largest magnitude, and the limit that it is clipped to."""
        largest, deviation = loops.spread(x)
        factor = self.options.clip_factor
        cut = factor is not None and deviation > CONSTANT * largest
        return largest, factor * deviation if cut else math.inf


@dataclass(frozen=True)
class DorefaOptions:
    """Options of ``dorefa``."""

    # k, from 1 to 8. In the paper, accuracy suffers below 4 bits.
    bits: int = 4

    def __post_init__(self) -> None:
        require_integer("bits", self.bits, 1, 8)


class Dorefa(Coded):
    """k-bit gradients: each entry becomes one of 2^k levels, at random and without bias, without error feedback.

    ``f(r) = 2M [quantise_k(r / 2M + 1/2 + noise) - 1/2]`` with ``M = max|r|`` of the tensor, noise uniform in
    ``±1/2 / (2^k - 1)`` and ``quantise_k(z) = round((2^k - 1) z) / (2^k - 1)``. The levels are odd multiples of
    ``M / (2^k - 1)``: zero is not a level and becomes one of its two neighbours. An element takes k bits, a tensor
    one float.

    Departure: the paper quantises the gradients of activations, with one M per image. Here the gradients of weights
    are quantised, with one M per tensor.

    Source: Zhou et al. 2016, arXiv 1606.06160, equation 12.
    """

    name = "dorefa"
    number = 9
    source = "Zhou et al. 2016, arXiv 1606.06160"
    bits = "4 (or 1 to 8) + 1 float a tensor"
    error_feedback = False
    unbiased = True
    Options = DorefaOptions
    options: DorefaOptions

    @property
    def _levels(self) -> int:
        return (1 << self.options.bits) - 1

    @override
    def quantise(
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = as_scale(float(np.abs(x).max(initial=0.0)))
        codes = np.empty(tensor.n, np.uint8)
        loops.round_span(x, float(scale), self._levels, info.key(tensor.name), codes)
        return np.array([scale], np.float32), codes

    @override
    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:
        out = np.empty(tensor.n, np.float32)
        loops.scale_span(codes, scales[0], self._levels, out)
        return out
