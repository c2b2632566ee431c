"""The tables that the CUDA kernels read and write, as NumPy types; each mirrors a ``struct`` of the sources.

S segments, or T tensors; a tile is TILE elements of one of them. Dense tensors go many in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc.core.kernels.base import Array, SegmentWork
from dgc.core.kernels.cpu.work_table import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, HEAVY_BALL, NESTEROV, NO_MOMENTUM
from dgc.core.kernels.gpu.cuda.source import SPAN, TILE
from dgc.errors import LayoutError

CANDIDATES, WHOLE, DONE = range(3)
"""Where a segment's entries come from; DONE: they have been chosen."""
CHOSEN, OUT_OF_RANGE, BEYOND_BINS = range(3)
"""What became of a segment's selection."""


def _struct(*fields: tuple[type, str]) -> np.dtype:
    """The C struct of these fields, in order: types, each with the names of its fields."""
    return np.dtype([(name, kind) for kind, names in fields for name in names.split()])


SEGMENT = _struct(
    (np.uint64, "gradient parameter"),
    (np.int64, "offset"),
    (np.uint64, "key"),
    (np.float64, "momentum decay scale"),
    (np.int32, "length k first_tile tiles room most fewest gradient_type parameter_type form source open place unused"),
)
FOUND = _struct((np.uint64, "low"), (np.int32, "width want total taken base status"))
SUMMARY = _struct((np.int32, "count nonfinite unfinished blocks"))
RUN = _struct((np.int32, "start count"))
TARGET = _struct((np.uint64, "result"), (np.int64, "offset length first_tile"))
TENSOR = _struct(
    (np.uint64, "result gradient parameter"),
    (np.int64, "u vector length"),
    (np.float64, "momentum decay scale limit"),
    (np.int32, "gradient_type parameter_type form first_tile"),
)
SIZES = {SEGMENT: 112, FOUND: 32, SUMMARY: 16, RUN: 8, TARGET: 32, TENSOR: 96}
assert all(dtype.itemsize == size for dtype, size in SIZES.items())

_CODES = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float16): FLOAT16,
    # Neither NumPy nor CuPy knows bfloat16: its bits are kept as uint16.
    np.dtype(np.uint16): BFLOAT16,
}


def element_code(array: Array, length: int, what: str) -> int:
    """Code of a 1-D device array's type, once it is known to be what a kernel may read at its address.

    Raises:
        LayoutError: another shape, not contiguous, or no float type.
    """
    if array.shape != (length,):
        raise LayoutError(f"the {what} has shape {array.shape}; expected ({length},)")
    if not array.flags.c_contiguous:
        raise LayoutError(f"the {what} is a strided view; pass a contiguous copy")
    code = _CODES.get(array.dtype)
    if code is None:
        raise LayoutError(
            f"the {what} has type {array.dtype}; allowed: float16, float32, float64, and uint16 as the bits of bfloat16"
        )
    return code


def momentum_form(momentum: float, nesterov: bool) -> int:
    """Which update a tensor gets."""
    return NO_MOMENTUM if momentum == 0 else NESTEROV if nesterov else HEAVY_BALL


class Geometry:
    """How segments or tensors of given lengths fall into tiles and spans; the same at every step of a bucket.

    Attributes:
        tiles: their number.
        spans: number of groups of up to SPAN tiles of one segment.
        first_tile: (S,) int32.
        tiles_of: (S,) int32.
        tile_segment: (tiles,) int32, each tile's segment.
        span_tile: (spans,) int32, each span's first tile.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Lay out the tiles.

        Raises:
            LayoutError: 2**31 elements or more in one segment.
        """
        if any(not 0 <= n < 2**31 for n in lengths):
            raise LayoutError(f"a tensor of {max(lengths)} elements cannot be compressed; the limit is 2**31 - 1")
        count = np.array(lengths, np.int64).reshape(-1)
        self.tiles_of = (-(-count // TILE)).astype(np.int32)
        ends = np.cumsum(self.tiles_of, dtype=np.int64)
        self.tiles = int(ends[-1]) if len(ends) else 0
        self.first_tile = (ends - self.tiles_of).astype(np.int32)
        self.tile_segment = np.repeat(np.arange(len(count), dtype=np.int32), self.tiles_of)
        within = np.arange(self.tiles, dtype=np.int32) - self.first_tile[self.tile_segment]
        self.span_tile = np.flatnonzero(within % SPAN == 0).astype(np.int32)
        self.spans = len(self.span_tile)


def fill_segments(table: np.ndarray, work: Sequence[SegmentWork], geometry: Geometry, size: int, address: Any) -> None:
    """Write everything of a bucket's work that does not depend on the thresholds.

    Args:
        table: (S,) of SEGMENT.
        work: the segments.
        geometry: of their lengths.
        size: elements of v; segments must lie inside.
        address: the runtime's function from device array to address.

    Raises:
        LayoutError: an array or a segment is not what a kernel may touch.
    """
    rows = []
    for w, first, tiles in zip(work, geometry.first_tile.tolist(), geometry.tiles_of.tolist(), strict=True):
        length = w.length
        if w.offset < 0 or length < 0 or w.offset + length > size:
            raise LayoutError(f"a segment at {w.offset} of {length} elements does not fit into {size}")
        parameter = w.parameter if w.weight_decay else None
        rows.append(
            (
                address(w.gradient),
                0 if parameter is None else address(parameter),
                w.offset,
                0,
                w.momentum,
                0.0 if parameter is None else w.weight_decay,
                w.scale,
                length,
                max(0, min(w.k, length)),
                first,
                tiles,
                0,
                0,
                0,
                element_code(w.gradient, length, "gradient"),
                0 if parameter is None else element_code(parameter, length, "parameter"),
                momentum_form(w.momentum, w.nesterov),
                WHOLE,
                0,
                0,
                0,
            )
        )
    table[:] = np.array(rows, SEGMENT)
    table["place"] = np.cumsum(table["k"]) - table["k"]


@dataclass(slots=True)
class DenseTensor:
    """One tensor's part in a launch. What an operation does not need stays as it is.

    ``result``, ``gradient`` and ``parameter`` are (length,) device arrays; ``u`` and ``vector`` are the places where
    the tensor begins in the momentum buffer and in the vector of means.
    """

    result: Array = None
    gradient: Array = None
    parameter: Array = None
    u: int = 0
    vector: int = -1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    scale: float = 1.0
    limit: float | None = None

    @property
    def length(self) -> int:
        """Elements."""
        return int((self.result if self.gradient is None else self.gradient).size)


def tensor_table(
    tensors: Sequence[DenseTensor], geometry: Geometry, bits: int, address: Callable[[Any], int]
) -> np.ndarray:
    """Return the (T,) TENSOR table of one launch.

    Args:
        tensors: T of them.
        geometry: of their lengths.
        bits: 32 or 64, the type of results, means and momentum.
        address: the runtime's function from device array to address.

    Raises:
        LayoutError: an array is not what a kernel may touch.
    """
    rows = []
    for t, first in zip(tensors, geometry.first_tile.tolist(), strict=True):
        if t.result is not None and (8 * t.result.dtype.itemsize != bits or not t.result.flags.c_contiguous):
            raise LayoutError(f"a result is {t.result.dtype}; it must be contiguous float{bits}")
        rows.append(
            (
                0 if t.result is None else address(t.result),
                0 if t.gradient is None else address(t.gradient),
                0 if t.parameter is None else address(t.parameter),
                t.u,
                t.vector,
                t.length,
                t.momentum,
                t.weight_decay,
                t.scale,
                np.inf if t.limit is None else t.limit,
                0 if t.gradient is None else element_code(t.gradient, t.length, "gradient"),
                0 if t.parameter is None else element_code(t.parameter, t.length, "parameter"),
                momentum_form(t.momentum, t.nesterov),
                first,
            )
        )
    return np.array(rows, TENSOR)
