"""The sparse family's message: (position, value) pairs through an index codec and a value codec."""

from __future__ import annotations

import numpy as np

from dgc.core.state.layout import Bucket
from dgc.core.wire.codecs.blocks import padded
from dgc.core.wire.codecs.float_values import Float16Values
from dgc.core.wire.codecs.indices import Uint16Indices, tiles_of
from dgc.core.wire.codecs.registry import resolve_index_codec, value_codec

SPARSE_ID = 1
"""Compressor id of ``dgc`` in the header."""


class SparseCodec:
    """Encodes selected entries of one bucket at one density; knows what the receiver will read."""

    def __init__(self, bucket: Bucket, k: int, indices: str, values: str) -> None:
        """Look up the codecs; ``indices="auto"`` takes the smallest for k entries of this bucket.

        Raises:
            ConfigError: an unknown codec name; the message lists the valid ones.
        """
        self._bucket = bucket
        n = bucket.sparse_size
        self.indices = resolve_index_codec(indices, n, k)
        self.values = value_codec(values)
        self._is_default = (self.indices.name, self.values.name) == ("uint16", "float16")
        used = self.indices.max_bytes(n, k) + self.values.max_bytes(k, len(bucket.sparse)) if k else 0
        self.max_bytes = -(-used // 8) * 8
        """Payload bytes that hold any k entries, a multiple of 8."""

    def bounds(self, positions: np.ndarray) -> np.ndarray:
        """Where each group of the values begins among ascending ``positions``: (S + 1,) int64, by segments, or (2,)."""
        if not self.values.grouped:
            return np.array([0, positions.size], np.int64)
        return np.searchsorted(positions, self._bucket.sparse_offsets)

    def encode(self, positions: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the payload; returns the values as every receiver will decode them.

        Args:
            positions: (k,) int64, ascending, unique, below n.
            values: (k,) float.
            out: (payload_bytes,) uint8; what is left over is zeroed.

        Returns:
            (k,) float32.
        """
        if self._is_default:
            done = encode_default(positions, values, self._bucket.sparse_size, out)
            if done is not None:
                used, decoded = done
                out[used:] = 0
                return decoded
        bounds = self.bounds(positions)
        values = values.astype(self.values.dtype, copy=False)
        used = self.indices.encode(positions, self._bucket.sparse_size, out)
        values_at, used = used, used + self.values.encode(values, bounds, out[used:])
        out[used:] = 0
        return self.values.decode(out[values_at:], len(values), bounds)[0]

    def roundtrip(self, positions: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The values as :meth:`encode` would send them, (k,) float32."""
        return self.values.roundtrip(values.astype(self.values.dtype, copy=False), self.bounds(positions))

    def decode(self, payload: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read a payload: (count,) int64 positions and (count,) values.

        Raises:
            WireError: the payload is damaged; nothing was applied.
        """
        positions, used = self.indices.decode(payload, self._bucket.sparse_size, count)
        values, _ = self.values.decode(payload[used:], count, self.bounds(positions))
        return positions, values


def encode_default(positions: np.ndarray, values: np.ndarray, n: int, out: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Write an index block and a value block.

    Args:
        positions: (k,) int64, ascending, below n.
        values: (k,) float32.
        n: elements of the bucket.
        out: (m,) uint8, contiguous.

    Returns:
        Bytes written, and the values as they will be read, (k,) float32. None when the codecs have to look
        themselves: values that are not finite or far from 1, arrays of another kind, or too little room.
    """
    from dgc.core.wire.codecs import numba_loops as loops

    k = positions.size
    if not (_plain(positions, np.int64) and _plain(values, np.float32) and _plain(out, np.uint8)):
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
