"""The sum of what all ranks have sent of a bucket's sparsified tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc.core.compressors.base import DenseValues, SparseValues
from dgc.core.kernels.base import Kernels, is_finite
from dgc.core.layout import Bucket


def add_up(
    bucket: Bucket,
    decoded: Sequence[SparseValues | DenseValues],
    results: Sequence[Any],
    factor: float,
    kernels: Kernels,
) -> bool:
    """Write the sum of what the ranks have sent, in their order, times ``factor``; return whether it is finite."""
    entries = [(each.positions, each.values) for each in decoded if isinstance(each, SparseValues)]
    if entries:
        from dgc.core.kernels import cpu  # this import loads Numba

        positions, sums = cpu.add_up(entries, factor)
        if finite := bool(np.isfinite(sums).all()):
            kernels.set_entries(results, bucket.sparse_offsets, positions, sums)
        return finite
    for result in results:
        result.fill(0)
    for each in decoded:
        assert isinstance(each, DenseValues), "a compressor always returns the same type"
        for result, values in zip(results, each.values, strict=True):
            result += values * result.dtype.type(factor)
    return all(is_finite(result) for result in results)
