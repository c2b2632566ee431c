"""The bytes of a bucket's small dense tensors: a value codec, with each tensor as a group of its own.

n = elements of the tensors, S = tensors, N = elements of the space that they lie in, padding between them included.
"""

from __future__ import annotations

import numpy as np

from dgc.core.state.layout import Bucket
from dgc.core.wire.codecs.quantized_values import IntegerValues
from dgc.core.wire.codecs.registry import value_codec


class SmallCodec:
    """Writes the small tensors of one bucket, reads them, and says what is lost; ``max_bytes`` is always used up."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        """Look up the codec.

        Raises:
            ConfigError: an unknown name; the message lists the valid ones.
        """
        self.values = value_codec(name)
        self.size = bucket.small_size
        segments = [s for s in bucket.small if s.length]
        self._starts = np.array([s.offset - bucket.sparse_size for s in segments], np.int64)
        self._bounds = np.cumsum([0, *(s.length for s in segments)], dtype=np.int64)
        self.max_bytes = self.values.max_bytes(int(self._bounds[-1]), len(segments))
        lengths = np.diff(self._bounds)
        # Where each element lies; the padding between tensors is not sent.
        self._places = np.repeat(self._starts - self._bounds[:-1], lengths) + np.arange(self._bounds[-1])

    def encode(self, x: np.ndarray, out: np.ndarray, left: np.ndarray) -> None:
        """Write the block of (N,) float32 ``x``, finite, 0 between tensors; ``left`` becomes ``x - decoded``."""
        left.fill(0)
        if isinstance(self.values, IntegerValues):
            self.values.write_apart(x, self._starts, self._bounds, out, left)
            return
        values = x[self._places]
        self.values.encode(values, self._bounds, out)
        left[self._places] = values - self.values.decode(out, values.size, self._bounds)[0]

    def add(self, data: np.ndarray, sums: np.ndarray) -> None:
        """Read a block and add it to ``sums``, (N,) float32.

        Raises:
            WireError: the block is damaged.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(self.values, IntegerValues):
                self.values.add_apart(data, self._starts, self._bounds, sums)
            else:
                sums[self._places] += self.values.decode(data, int(self._bounds[-1]), self._bounds)[0]
