"""Messages of scales and codes: what such compressors have in common, and what kernels need to know of them.

Letters: n elements of a tensor. Sums over many elements are made in an order that is written down here, so that every
backend gets the same bits:

- Of a group of elements: 32 sums, of the elements i, i + 32, ... in turn. Those of the upper half are added to those of
  the lower half, until one is left.
- Of a tile of ``TILE`` elements: 256 sums of that kind. Each 32 of them become one, and those are added in turn.
- Of a tensor, or a row of it: over its tiles in turn. Down a column: over pieces of ``ROWS`` rows in turn.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dgc.core.compressors.base import BucketSpec, PerTensor, StepInfo, Tensor, put, take_scales
from dgc.core.config.config import DGCConfig
from dgc.errors import WireError

TILE = 4096
"""Elements that are added up together."""
ROWS = 64
"""Rows of a matrix that are added up together, column by column."""
LARGEST_GROUP = 65536
"""Elements with a common norm up to which a device adds them up: 32 threads do that together."""


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
    """A compressor that sends scales and a code for each element, which kernels of a device write and read, too."""

    measures: ClassVar[bool] = False
    """Whether scales are chosen from the tensors' moments, by :meth:`measured` and :meth:`scale`."""

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
        from dgc.core.wire.codecs import numba_packing as packing

        scales, codes = self.quantise(x, tensor, spec, info)
        block, bits = out[put(out, 0, scales) :], self.form(tensor).bits
        if bits:
            packing.pack(codes, bits, block)
        else:
            packing.pack_trits(codes, block)
        return tensor.n

    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> np.ndarray:  # noqa: D102
        from dgc.core.wire.codecs import numba_packing as packing

        form, codes = self.form(tensor), np.empty(tensor.n, np.uint8)
        scales = take_scales(data, 0, form.scales, signed=form.kind == "sign")
        block = data[scales.nbytes :]
        if form.bits:
            packing.unpack(block, form.bits, codes)
        elif not packing.unpack_trits(block, codes):
            raise WireError("a byte is no five ternary numbers; the message is damaged")
        return self.restore(scales, codes, tensor)

    @classmethod
    def runs_on_device(cls, config: DGCConfig) -> bool:  # noqa: D102
        return True

    def measured(self, tensor: Tensor, moments: np.ndarray) -> float:
        """Look at a tensor's moments, (tiles, 3) float64; returns the number of which all ranks need the largest."""
        return 0.0

    def scale(self, tensor: Tensor, index: int, moments: np.ndarray, info: StepInfo) -> tuple[np.float32, float]:
        """A tensor's scale, and where its magnitudes are cut, by its place in the bucket and its moments."""
        raise NotImplementedError(f"{self.name!r} has no scale of a whole tensor")


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
