"""A bucket whose selected entries all ranks receive from all ranks, in their messages, and add up."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from dgc.core.codecs import SmallCodec
from dgc.core.exchange.dense import DenseVector
from dgc.core.exchange.encoders import Encoder
from dgc.core.exchange.plan import Plan
from dgc.core.exchange.sizes import Setting, fits_inside
from dgc.core.message import Form, Incoming


class Gather(Plan):
    """The payload of the message holds the entries. Small tensors are coded if that is cheaper than an allreduce."""

    way = "gathered"
    encodes = True

    def __init__(self, setting: Setting, encoder: Encoder) -> None:
        bucket, ranks = setting.bucket, setting.ranks
        codec = SmallCodec(bucket, setting.small) if setting.small != "float32" and bucket.small_size else None
        if codec and not fits_inside(codec.max_bytes, 4 * bucket.small_size, ranks):
            codec = None
        start = bucket.sparse_size
        vector = DenseVector(setting, start=start, origin=start, is_coded=codec is not None)
        form = Form(
            encoder.ids,
            sum(encoder.ks),
            encoder.max_bytes,
            codec.max_bytes if codec else 0,
            vector.inline_bytes,
            int(codec.values.id) if codec else 0,
        )
        super().__init__(setting, encoder, vector, form, [codec] if codec else [])

    @override
    def add_up(self, messages: Sequence[Incoming], factor: float) -> bool:
        decoded = []
        for message in messages:
            with message.blamed():
                decoded.append(self.encoder.decode(message.payload, message.count))
        return self._add_up(decoded, factor)
