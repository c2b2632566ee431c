"""The sum of what all ranks have sent of a bucket's sparsified tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc.core.compressors.base import DenseValues, SparseValues
from dgc.core.kernels.base import Array, Kernels, is_finite
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


def add_up(
    bucket: Bucket, decoded: Sequence[SparseValues | DenseValues], results: Sequence[Any], factor: float
) -> tuple[EntrySum | None, bool]:
    """Add up what the ranks have sent, in their order, times ``factor``.

    Returns:
        The sum of entries; None if the values were dense, and their sum was written to ``results``. And whether all
        values are finite.
    """
    entries = [(each.positions, each.values) for each in decoded if isinstance(each, SparseValues)]
    if entries:
        total = EntrySum.of(bucket, entries, factor)
        return total, bool(np.isfinite(total.values).all())
    for result in results:
        result.fill(0)
    for each in decoded:
        assert isinstance(each, DenseValues), "a compressor always returns the same type"
        for result, values in zip(results, each.values, strict=True):
            result += values * result.dtype.type(factor)
    return None, all(is_finite(result) for result in results)
