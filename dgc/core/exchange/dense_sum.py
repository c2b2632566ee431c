"""A bucket as a dense sum: of the gradients, in steps without compression, or of selected entries between zeros.

At a high density the vector of selected entries, most of which are not 0, takes fewer bytes than their positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from dgc.core.compressors.base import SparseValues
from dgc.core.exchange.dense import DenseVector
from dgc.core.exchange.encoders import Encoder
from dgc.core.exchange.plan import Plan
from dgc.core.exchange.sizes import Setting
from dgc.core.kernels.base import Array, SegmentWork
from dgc.core.message import Form, Incoming
from dgc.core.state import BucketState


class DenseSum(Plan):
    """The vector covers the whole bucket. The message carries no entries, only flags and perhaps the vector."""

    way = "dense sum"

    def __init__(self, setting: Setting, encoder: Encoder) -> None:
        vector = DenseVector(setting, start=0, origin=setting.bucket.sparse_size if encoder.ks else 0)
        form = Form(encoder.ids, sum(encoder.ks), inline_bytes=vector.inline_bytes)
        super().__init__(setting, encoder, vector, form)
        self.added, self.small_bytes = vector.size if encoder.ks else 0, 0

    @override
    def write(self, state: BucketState) -> bool:
        if self.encoder.ks:
            values, own = self.vector.values, self.encoder.sent()
            values[: self._bucket.sparse_size] = 0
            if isinstance(own, SparseValues):
                values[own.positions] = own.values
            else:
                for segment, each in zip(self._bucket.sparse, own.values, strict=True):
                    values[segment.slice] = each
        return super().write(state)

    @override
    def add_up(self, messages: Sequence[Incoming], factor: float) -> bool:
        return True  # the vector is: add_up_dense() has found that

    @override
    def write_results(self, results: Sequence[Array]) -> None:
        scale = self._step.loss_scale  # the vector was multiplied by the rest of the factor
        parts = [
            SegmentWork(offset=s.offset, length=s.length, scale=scale, result=result)
            for s, result in zip(self._bucket.sparse, results, strict=True)
        ]
        self._kernels.update(parts, self.vector.values)
