"""Messages of scales and codes: what such compressors have in common, and the compressors.

Letters: n elements of a tensor. Sums over many elements are made in an order that is written down here, so that every
backend gets the same bits:

- Of a group of elements: 32 sums, of the elements i, i + 32, ... in turn. Those of the upper half are added to those of
  the lower half, until one is left.
- Of a tile of ``TILE`` elements: 256 sums of that kind. Each 32 of them become one, and those are added in turn.
- Of a tensor, or a row of it: over its tiles in turn. Down a column: over pieces of ``ROWS`` rows in turn.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dgc.core.compressors.base import (
    BucketSpec,
    PerTensor,
    StepInfo,
    Tensor,
    as_scale,
    put,
    take_scales,
)
from dgc.core.config import DGCConfig, require_choice, require_integer, require_number
from dgc.errors import WireError

TILE = 4096
"""Elements that are added up together."""
ROWS = 64
"""Rows of a matrix that are added up together, column by column."""


@dataclass(frozen=True)
class CodeForm:
    """How a tensor's block lies in a message: ``scales`` float32 numbers, and behind them the codes of all elements."""

    kind: Literal["signed", "span", "sign"]
    """What a code means: see ``round_signed``, ``round_span`` and ``split_means`` of the loops."""
    bits: int
    """Of a code, 1 to 8; 0: five of them to a byte, as a number to the base 3."""
    levels: int
    scales: int
    group: int
    """Elements that share a scale."""
    shape: tuple[int, int, int] = (1, 1, 1)
    """(outer, columns, inner) of a sign; a column has a pair of means."""
    norm: Literal["", "l2", "max"] = ""
    """The scale is each group's norm; "": it is chosen from the tensor's moments."""

    def bytes(self, n: int) -> int:
        """Of a block, without what pads it."""
        return 4 * self.scales + (-(-n // 5) if self.bits == 0 else -(-n * self.bits // 8))


class Coded(PerTensor):
    """A compressor that sends scales and a code for each element."""

    @abstractmethod
    def form(self, tensor: Tensor) -> CodeForm:
        """How this tensor's block lies."""

    @abstractmethod
    def quantise(
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scales, float32, and (n,) uint8 codes of a tensor; arguments as for :meth:`encode_tensor`."""

    @abstractmethod
    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:
        """The (n,) float32 that scales and codes stand for.

        Raises:
            WireError: they are none that a sender writes.
        """

    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:  # noqa: D102
        return self.form(tensor).bytes(tensor.n)

    def encode_tensor(  # noqa: D102
        self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> int:
        from dgc.core import loops as packing

        scales, codes = self.quantise(x, tensor, spec, info)
        block, bits = out[put(out, 0, scales) :], self.form(tensor).bits
        if bits:
            packing.pack(codes, bits, block)
        else:
            packing.pack_trits(codes, block)
        return tensor.n

    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> np.ndarray:  # noqa: D102
        from dgc.core import loops as packing

        form, codes = self.form(tensor), np.empty(tensor.n, np.uint8)
        scales = take_scales(data, 0, form.scales, signed=form.kind == "sign")
        block = data[scales.nbytes :]
        if form.bits:
            packing.unpack(block, form.bits, codes)
        elif not packing.unpack_trits(block, codes):
            raise WireError("a byte is no five ternary numbers; the message is damaged")
        return self.restore(scales, codes, tensor)


def tiles_of(n: int) -> int:
    """How many tiles a tensor has."""
    return -(-n // TILE)


def magnitude_and_deviation(moments: np.ndarray, n: int) -> tuple[float, float]:
    """The largest magnitude and the standard deviation of a tensor, n > 0.

    Args:
        moments: (tiles, 3) float64: of each tile the largest magnitude, the sum, and the sum of squares of what its
            elements differ from their mean (Chan et al. 1983 put them together).
        n: elements.
    """
    counts = np.full(len(moments), float(TILE))
    counts[-1] = n - TILE * (len(moments) - 1)
    mean = _in_turn(moments[:, 1]) / n
    with np.errstate(over="ignore"):
        apart = moments[:, 1] / counts - mean
        squares = _in_turn(moments[:, 2]) + _in_turn(counts * apart * apart)
    return float(moments[:, 0].max()), float(np.sqrt(squares / n))


def _in_turn(values: np.ndarray) -> float:
    """A sum in the order of its terms, which ``np.sum`` does not keep."""
    return float(np.cumsum(values)[-1])


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
        from dgc.core import loops

        shape = self._shape(tensor)
        means, signs = np.empty((2, shape[1]), np.float32), np.empty(tensor.n, np.uint8)
        loops.split_means(np.ascontiguousarray(x).reshape(shape), means, signs)
        np.nan_to_num(means, copy=False)  # a mean beyond float32 becomes its largest number
        return means, signs

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core import loops

        out = np.empty(self._shape(tensor), np.float32)
        loops.spread_means(codes, scales.reshape(2, -1), out)
        return out.reshape(-1)

    def _shape(self, tensor: Tensor) -> tuple[int, int, int]:
        """(outer, columns, inner) such that elements of one column share the middle index."""
        rows = tensor.shape[0] if tensor.shape else 1
        if self.options.means == "tensor":
            return 1, 1, tensor.n
        return (rows, tensor.n // rows, 1) if self.options.means == "column" else (1, rows, tensor.n // rows)


@dataclass(frozen=True)
class QsgdOptions:
    """Options of ``qsgd``."""

    bits: int = 4
    """2, 4 or 8: s = 1, 7 or 127 levels of either sign."""
    bucket_size: int = 512
    """Elements that share a norm (the paper's bucket)."""
    norm: Literal["l2", "max"] = "l2"
    """"l2" as in the paper's analysis, or "max" as in its experiments: less variance, fewer zeros."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_choice("bits", self.bits, (2, 4, 8))
        require_integer("bucket_size", self.bucket_size, 1)
        require_choice("norm", self.norm, ("l2", "max"))


class Qsgd(Coded):
    """Quantised SGD: unbiased, without error feedback.

    In each bucket of d elements ``Q(x_i) = norm * sign(x_i) * ξ_i``: with ``a = |x_i| * s / norm``, ξ is
    ``(floor(a) + 1) / s`` with probability ``a - floor(a)``, else ``floor(a) / s``. Its variance is at most
    ``min(d / s², sqrt(d) / s) * norm²`` for the L2 norm. ceil(log2(2s + 1)) bits an element, and a float a bucket.

    Departure: codes of a fixed length instead of the paper's Elias codes, so that no sizes are exchanged.

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

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        own = self.options
        return CodeForm("signed", own.bits, self._levels, self._groups(tensor), own.bucket_size, norm=own.norm)

    def _groups(self, tensor: Tensor) -> int:
        return -(-tensor.n // self.options.bucket_size)

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core import loops

        group = self.options.bucket_size
        exact = np.empty(self._groups(tensor))
        # Never below a group's largest magnitude, or that would be cut and not rounded.
        loops.norms(x, group, self.options.norm == "l2", exact)
        norms = np.minimum(exact, np.finfo(np.float32).max).astype(np.float32)
        codes = np.empty(tensor.n, np.uint8)
        loops.round_signed(x, norms, group, np.inf, self._levels, info.key(tensor.name), codes)
        return norms, codes

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core import loops

        out = np.empty(codes.size, np.float32)
        if not loops.scale_signed(codes, scales, self.options.bucket_size, self._levels, out):
            raise WireError("a level is beyond the largest; the message is damaged")
        return out


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
    Options = TerngradOptions

    def __init__(self, config: DGCConfig) -> None:
        """Begin with no tensor prepared."""
        super().__init__(config)
        self._limits: dict[str, float] = {}

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        return CodeForm("signed", 0, 1, scales=1, group=tensor.n)

    def prepare(self, x: np.ndarray, spec: BucketSpec) -> np.ndarray:
        """Each tensor's largest magnitude after clipping; where it is cut is kept for :meth:`quantise`."""
        largest = np.empty(len(spec.tensors))
        for i, tensor in enumerate(spec.tensors):
            largest[i], self._limits[tensor.name] = self._extent(x[tensor.slice])
            largest[i] = min(largest[i], self._limits[tensor.name])
        return largest

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core import loops

        limit = self._limits.pop(tensor.name, None)
        if limit is None:
            limit = self._extent(x)[1]
        scale = as_scale(float(info.shared[spec.tensors.index(tensor)]))
        scales, codes = np.array([scale], np.float32), np.empty(tensor.n, np.uint8)
        loops.round_signed(x, scales, tensor.n, limit, 1, info.key(tensor.name), codes)
        return scales, codes

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core import loops

        out = np.empty(tensor.n, np.float32)
        loops.scale_signed(codes, scales, tensor.n, 1, out)
        return out

    def _extent(self, x: np.ndarray) -> tuple[float, float]:
        """A tensor's largest magnitude, and where it is cut."""
        largest, deviation = magnitude_and_deviation(_moments(x), x.size)
        factor = self.options.clip_factor
        if deviation <= CONSTANT * largest:  # rounding leaves a trace of deviation in a constant float64 tensor
            deviation = 0.0
        return largest, math.inf if factor is None else factor * deviation or math.inf


def _moments(x: np.ndarray) -> np.ndarray:
    from dgc.core import loops

    found = np.empty((tiles_of(x.size), 3))
    loops.moments(x, found)
    return found


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
    Options = DorefaOptions
    options: DorefaOptions

    @property
    def _levels(self) -> int:
        return (1 << self.options.bits) - 1

    def form(self, tensor: Tensor) -> CodeForm:  # noqa: D102
        return CodeForm("span", self.options.bits, self._levels, scales=1, group=tensor.n)

    def quantise(  # noqa: D102
        self, x: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        from dgc.core import loops

        scale = as_scale(float(np.abs(x).max(initial=0.0)))
        codes = np.empty(tensor.n, np.uint8)
        loops.round_span(x, float(scale), self._levels, info.key(tensor.name), codes)
        return np.array([scale], np.float32), codes

    def restore(self, scales: np.ndarray, codes: np.ndarray, tensor: Tensor) -> np.ndarray:  # noqa: D102
        from dgc.core import loops

        out = np.empty(tensor.n, np.float32)
        loops.scale_span(codes, scales[0], self._levels, out)
        return out
