"""The default codecs, ``uint16`` positions and ``float16`` values, in one call where Numba runs; the same bytes."""

from __future__ import annotations

import numpy as np

from dgc.core.wire.bits import default_loops
from dgc.core.wire.blocks import padded
from dgc.core.wire.float_values import Float16Values
from dgc.core.wire.plain_indices import Uint16Indices, tiles_of


def encode_default(positions: np.ndarray, values: np.ndarray, n: int, out: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Write an index block and a value block.

    Args:
        positions: (k,) int64, ascending, below n.
        values: (k,) float32.
        n: elements of the bucket.
        out: (m,) uint8, contiguous.

    Returns:
        Bytes written, and the values as they will be read, (k,) float32. None when the codecs have to look
        themselves: no Numba, values that are not finite or far from 1, arrays of another kind, or too little room.
    """
    loops, k = default_loops(), positions.size
    if loops is None or not (_plain(positions, np.int64) and _plain(values, np.float32) and _plain(out, np.uint8)):
        return None
    tiles = tiles_of(n)
    if values.size != k or out.size < padded(4 * tiles) + 2 * padded(2 * k) + Float16Values.HEAD:
        return None
    if n > Uint16Indices.LIMIT or (k and positions[-1] >= n):
        return None
    decoded = np.empty(k, np.float32)
    used = loops.encode_message(positions, values, tiles, out, decoded)
    return None if used < 0 else (used, decoded)


def _plain(array: np.ndarray, dtype: type) -> bool:
    """Whether it is of the one kind that the loop is compiled for."""
    return array.dtype == dtype and array.ndim == 1 and array.flags.carray
