"""The sparse family's message: (position, value) pairs through an index codec and a value codec."""

from __future__ import annotations

import numpy as np

from dgc.core.state.layout import Bucket
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
        used = self.indices.max_bytes(n, k) + self.values.max_bytes(k, len(bucket.sparse)) if k else 0
        self.max_bytes = -(-used // 8) * 8
        """Payload bytes that hold any k entries, a multiple of 8."""

    def encode(self, positions: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the payload; returns the values as every receiver will decode them.

        Args:
            positions: (k,) int64, ascending, unique, below n.
            values: (k,) float.
            out: (payload_bytes,) uint8; what is left over is zeroed.

        Returns:
            (k,) float32.
        """
        bounds = self._bounds(positions)
        values_at = self.indices.encode(positions, self._bucket.sparse_size, out)
        used = values_at + self.values.encode(values.astype(self.values.dtype, copy=False), bounds, out[values_at:])
        out[used:] = 0
        return self.values.decode(out[values_at:], len(values), bounds)[0]

    def decode(self, payload: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read a payload: (count,) int64 positions and (count,) values.

        Raises:
            WireError: the payload is damaged; nothing was applied.
        """
        positions, used = self.indices.decode(payload, self._bucket.sparse_size, count)
        values, _ = self.values.decode(payload[used:], count, self._bounds(positions))
        return positions, values

    def _bounds(self, positions: np.ndarray) -> np.ndarray:
        """Where each group of the values begins among ascending ``positions``: (S + 1,) int64, by segments, or (2,)."""
        if not self.values.grouped:
            return np.array([0, positions.size], np.int64)
        return np.searchsorted(positions, self._bucket.sparse_offsets)
