"""A bucket's work as two tables of numbers, the form in which kernels take it: no Python object is left in a loop.

S segments; addresses stand for arrays, so that one compiled kernel serves every mix of types and no array is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.errors import LayoutError
from dgc.core.kernels.base import SegmentWork

GRADIENT, GRADIENT_TYPE, PARAMETER, PARAMETER_TYPE, OFFSET, LENGTH, ENTRIES, FORM = range(8)
"""Columns of the (S, 13) int64 table that Python fills."""
KEY, MOST, FIRST_CHUNK, OUT, UNUSED = range(8, 13)
"""Columns that a kernel fills: the threshold's bits, the most candidates, the first chunk, the first output place."""
INTEGERS = 13

MOMENTUM, DECAY, SCALE, USED = range(4)
"""Columns of the (S, 4) float64 table; USED, the threshold of this pass, is filled by a kernel."""
REALS = 4

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(4)
"""Codes of element types."""
NO_MOMENTUM, HEAVY_BALL, NESTEROV = range(3)
"""Forms of momentum."""

_CODES = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float16): FLOAT16,
    # NumPy has no bfloat16: its bits travel as uint16.
    np.dtype(np.uint16): BFLOAT16,
}


def element_code(array: np.ndarray, length: int, what: str) -> int:
    """Code of a 1-D array's type, once it is known to be what a kernel may read at its address.

    Raises:
        LayoutError: another shape, not contiguous, not aligned, or no float type.
    """
    if array.ndim != 1 or array.shape[0] != length:
        raise LayoutError(f"the {what} has shape {array.shape}; expected ({length},)")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        raise LayoutError(f"the {what} is a strided or unaligned view; pass a contiguous copy")
    code = _CODES.get(array.dtype)
    if code is not None:
        return code
    if array.dtype.name == "bfloat16":
        return BFLOAT16
    raise LayoutError(
        f"the {what} has type {array.dtype}; allowed: float16, float32, float64, bfloat16 (also as its bits, uint16)"
    )


def make_table(work: Sequence[SegmentWork], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (S, 13) int64 and (S, 4) float64 tables of a bucket's work.

    Args:
        work: the segments.
        size: elements of v; segments must lie inside.

    Raises:
        LayoutError: an array or a segment is not what a kernel may touch.
    """
    integers: list[int] = []
    reals: list[float] = []
    for w in work:
        length = w.length
        if w.offset < 0 or length < 0 or w.offset + length > size:
            raise LayoutError(f"a segment at {w.offset} of {length} elements does not fit into {size}")
        code = element_code(w.gradient, length, "gradient")
        parameter = w.parameter if w.weight_decay else None
        form = NO_MOMENTUM if w.momentum == 0 else NESTEROV if w.nesterov else HEAVY_BALL
        integers += (
            w.gradient.ctypes.data,
            code,
            0 if parameter is None else parameter.ctypes.data,
            0 if parameter is None else element_code(parameter, length, "parameter"),
            w.offset,
            length,
            w.k if w.k < length else length,
            form,
            0,
            0,
            0,
            0,
            0,
        )
        reals += (w.momentum, w.weight_decay if parameter is not None else 0.0, w.scale, 0.0)
    count = len(work)
    return (
        np.array(integers, np.int64).reshape(count, INTEGERS),
        np.array(reals, np.float64).reshape(count, REALS),
    )
