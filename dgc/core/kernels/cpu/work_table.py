"""A bucket's work as two tables of numbers, the form in which kernels take it: no Python object is left in a loop.

S segments; addresses stand for arrays, so that one compiled kernel serves every mix of types and no array is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char

import numpy as np

from dgc.core.kernels.base import SegmentWork
from dgc.errors import LayoutError

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

_character_at = c_char.from_buffer
_FLOAT32 = np.dtype(np.float32)
_CODES = {
    _FLOAT32: FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float16): FLOAT16,
    # NumPy has no bfloat16: its bits are kept as uint16.
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
    if array.dtype is _FLOAT32:
        return FLOAT32
    code = _CODES.get(array.dtype)
    if code is not None:
        return code
    if array.dtype.name == "bfloat16":
        return BFLOAT16
    raise LayoutError(
        f"the {what} has type {array.dtype}; allowed: float16, float32, float64, bfloat16 (also as its bits, uint16)"
    )


def address_of(array: np.ndarray) -> int:
    """Address of a contiguous array's first element; the way around by ``array.ctypes`` takes four times as long."""
    try:
        return addressof(_character_at(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, empty, or a type that buffers do not know
        return array.ctypes.data


def place_of(array: np.ndarray, length: int, what: str) -> tuple[int, int]:
    """Address and type of a 1-D array of ``length`` elements.

    Raises:
        LayoutError: as for :func:`element_code`.
    """
    # The common case first: after a pass the caches are cold, and each further test fetches its code anew.
    if array.dtype is _FLOAT32 and array.shape == (length,) and array.flags.carray and length:
        return addressof(_character_at(array)), FLOAT32  # type: ignore[arg-type]
    return address_of(array), element_code(array, length, what)


def make_table(work: Sequence[SegmentWork], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (S, 13) int64 and (S, 4) float64 tables of a bucket's work.

    Args:
        work: the segments.
        size: elements of v; segments must lie inside.

    Raises:
        LayoutError: an array or a segment is not what a kernel may touch.
    """
    given: list[int] = []
    reals: list[float] = []
    for w in work:
        length, offset = w.length, w.offset
        if offset < 0 or length < 0 or offset + length > size:
            raise LayoutError(f"a segment at {offset} of {length} elements does not fit into {size}")
        decay, place = w.weight_decay, (0, 0)
        if decay and w.parameter is not None:
            place = place_of(w.parameter, length, "parameter")
        m = w.momentum
        form = (NESTEROV if w.nesterov else HEAVY_BALL) if m else NO_MOMENTUM
        given += place_of(w.gradient, length, "gradient")
        given += place
        given += (offset, length, min(w.k, length), form)
        reals += (m, decay, w.scale, 0.0)
    integers = np.zeros((len(work), INTEGERS), np.int64)
    integers[:, :KEY] = np.array(given, np.int64).reshape(len(work), KEY)
    return integers, np.array(reals, np.float64).reshape(len(work), REALS)
