"""The sum of the entries that all ranks have sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.kernels.base import Array, Kernels
from dgc.core.layout import Bucket


@dataclass(frozen=True, slots=True)
class EntrySum:
    """The results of a bucket's sparsified tensors, without the zeros.

    Attributes:
        bucket: the bucket.
        positions: (n,) int64 within the bucket's flat space, ascending and unique.
        values: (n,) of the bucket's type.
        bounds: (S + 1,) int64; tensor s has the entries from ``bounds[s]`` to ``bounds[s + 1]``.
    """

    bucket: Bucket
    positions: np.ndarray
    values: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, bucket: Bucket, entries: Sequence[tuple[np.ndarray, np.ndarray]], factor: float) -> EntrySum:
        """Add up the ranks' (positions, values) in rank order, times ``factor``."""
        from dgc.core.kernels.cpu import add_up  # this import loads Numba

        positions, values = add_up(entries, factor)
        return cls(bucket, positions, values, bucket.bounds(positions))

    def tensors(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (parameter, (m,) int64 places within it, (m,) values) for each tensor that has an entry."""
        for segment, first, stop in zip(self.bucket.sparse, self.bounds, self.bounds[1:], strict=False):
            if first < stop:
                yield segment.parameter, self.positions[first:stop] - segment.offset, self.values[first:stop]

    def write(self, results: Sequence[Array], kernels: Kernels) -> None:
        """Overwrite the sparsified tensors' results with these values and zeros."""
        kernels.set_entries(results, self.bucket.sparse_offsets, self.positions, self.values)
