"""The k largest entries where gradients, u, v and results are on a device.

What crosses is the message, once there and once back; the exchange between the two, on page-locked host memory, is that
of the CPU. For codecs that the device does not know (bit-packed, quantised) and for dense sums the entries cross as
they are, and the host codes them.

Formats that the device writes and reads itself are checked here before it reads.

n elements of a bucket's sparsified part, k entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.config.config import DGCConfig
from dgc.core.exchange.encoders.base import BucketStep
from dgc.core.exchange.encoders.device.vector import DeviceVector
from dgc.core.exchange.encoders.topk import TopKEncoder
from dgc.core.exchange.records import StepContext
from dgc.core.kernels.base import Array
from dgc.core.kernels.compile import entry
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.buckets import Begun
from dgc.core.kernels.gpu.tables import INDICES_UINT16, VALUES_FLOAT16, WIRE_TILE, Format
from dgc.core.state.layout import Bucket
from dgc.core.state.state import BucketState
from dgc.core.wire import IndexCodec, IndexCodecId, ValueCodec, ValueCodecId, padded
from dgc.core.wire.message import Incoming
from dgc.core.wire.plan import BucketPlan, Mode
from dgc.errors import WireError

_INDICES = {int(IndexCodecId.INT32): 0, int(IndexCodecId.UINT16): INDICES_UINT16}
_VALUES = {
    int(ValueCodecId.FLOAT32): 0,
    int(ValueCodecId.FLOAT64): 1,
    int(ValueCodecId.FLOAT16): VALUES_FLOAT16,
    int(ValueCodecId.BFLOAT16): 3,
}


class DeviceEncoder(TopKEncoder):
    """:class:`TopKEncoder` with whole buckets handed to the device's kernels.

    All buckets whose gradients are in are enqueued before the first message is waited for, and that wait is for all of
    them. A second one is needed when a threshold was of no use, and for clipping.
    Results are complete only when the kernels' stream has reached them.
    """

    _kernels: DeviceKernels

    def __init__(
        self, bucket: Bucket, config: DGCConfig, kernels: DeviceKernels, ranks: int, vector: DeviceVector
    ) -> None:
        """Allocate nothing; ``vector`` is the bucket's."""
        super().__init__(bucket, config, kernels, ranks)
        self._vector = vector
        self._scratch = kernels.new_scratch()
        self._dtype = np.dtype(bucket.dtype)
        kind = ValueCodecId.FLOAT64 if self._dtype == np.float64 else ValueCodecId.FLOAT32
        self._entries_as_they_are = Format(_INDICES[IndexCodecId.INT32], _VALUES[kind])
        self._enqueued: Begun | None = None

    def await_gradients(self, step: StepContext) -> None:
        """Let the kernels' stream wait for this bucket's gradients, results and parameters."""
        for event in step.submissions.events(self._bucket.index):
            self._kernels.runtime.wait_for(event.handle)

    def begin(self, at: BucketStep) -> None:  # noqa: D102
        plan, state = at.plan, at.state
        at.start_message()
        form = _format(plan)
        self._enqueued = self._kernels.begin(
            self._work(at) if plan.is_active else [],
            state.u,
            state.v,
            state.thresholds,
            form or self._entries_as_they_are,
            at.sender.payload if form else self._entries(sum(plan.ks)),
            self._vector.gradients(at.step, plan),
            self._vector.values[: plan.vector_size],
            scratch=self._scratch,
        )

    def abandon(self) -> None:  # noqa: D102
        enqueued, self._enqueued = self._enqueued, None
        if enqueued is not None:
            enqueued.finish()

    def catch_up(self, at: BucketStep) -> None:
        """See :class:`Encoder`; the message must not be written any more."""
        self.abandon()

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        if self._enqueued is None:
            self.begin(at)
        enqueued, self._enqueued = self._enqueued, None
        assert enqueued is not None
        done = enqueued.finish()
        self._vector.is_packed = True
        at.flagged = done.nonfinite
        if _format(at.plan):
            at.sent, at.count = (done.positions, done.values), done.count
        elif at.plan.is_active:
            count, entries = done.count, self._entries(done.count)
            values = entries[padded(4 * count) :].view(self._dtype)[:count]
            self._write(at, entries[: 4 * count].view(np.int32).astype(np.int64), values)

    def _entries(self, count: int) -> np.ndarray:
        """Page-locked memory for so many entries as they are, uint8."""
        return self._scratch.host("entries", padded(4 * count) + padded(self._dtype.itemsize * count))

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        # A damaged message is refused before anything is applied.
        form = _format(at.plan)
        payloads = self._checked(form, at.plan, messages) if form else self._decoded(at, messages)
        self._kernels.receive(
            [item.result for item in at.step.submissions.of(self._bucket.sparse)],
            self._bucket.sparse_offsets,
            self._bucket.sparse_size,
            form or self._entries_as_they_are,
            payloads,
            share * at.step.loss_scale,
        )
        # What other ranks send is finite, and the host does not wait for the device to look at the sum.

    def _checked(self, form: Format, plan: BucketPlan, messages: Sequence[Incoming]) -> list[tuple[np.ndarray, int]]:
        for message in messages:
            try:
                check_payload(form, message.payload, self._bucket.sparse_size, message.count, plan.codec.indices)
            except WireError as error:
                raise message.damaged(error) from error
        return [(message.payload, message.count) for message in messages]

    def _decoded(self, at: BucketStep, messages: Sequence[Incoming]) -> list[tuple[np.ndarray, int]]:
        """What :meth:`_entries` would hold of each message, side by side in page-locked memory."""
        k = sum(at.plan.ks)
        size = padded(4 * k) + padded(self._dtype.itemsize * k)
        rows = self._scratch.host("came", len(messages) * size).reshape(len(messages), size)
        payloads = []
        for row, (positions, values) in zip(rows, self._read(at, messages), strict=True):
            count = positions.size
            row[: 4 * count].view(np.int32)[:] = positions
            row[padded(4 * count) :].view(self._dtype)[:count] = values
            payloads.append((row, count))
        return payloads

    def _mask(self, plan: BucketPlan, state: BucketState, positions: Array, values: Array, masking: bool) -> None:
        mask = self._kernels.mask if _format(plan) is None else self._kernels.subtract
        mask(state.u, state.v, positions, values, masking=masking)


def _format(plan: BucketPlan) -> Format | None:
    """The device's format of this plan's messages, if it writes them itself."""
    if plan.mode is not Mode.SPARSE or not plan.ks:
        return None
    return device_format(plan.codec.indices, plan.codec.values)


def device_format(indices: IndexCodec, values: ValueCodec) -> Format | None:
    """The format of a pair of codecs, or None when the host has to do the work."""
    if int(indices.id) in _INDICES and int(values.id) in _VALUES:
        return Format(_INDICES[int(indices.id)], _VALUES[int(values.id)])
    return None


def check_payload(form: Format, payload: np.ndarray, n: int, count: int, index_codec: IndexCodec) -> None:
    """Refuse a damaged payload before anything of it is applied.

    Args:
        form: of the message.
        payload: (m,) uint8, aligned to 8 bytes, on the host.
        n: elements of the bucket.
        count: entries, from the header.
        index_codec: the codec of the indices, for the error.

    Raises:
        WireError: the positions are not ascending or not within the bucket, or the scale is out of range.
    """
    if not 0 <= count <= n:
        raise WireError(f"{index_codec.name}: the message claims {count} entries in a bucket of {n} elements")
    used = index_codec.max_bytes(n, count)
    if payload.size < used:
        raise WireError(f"{index_codec.name}: the block takes {used} bytes, the message has {payload.size}")
    if form.indices == INDICES_UINT16:
        tiles = -(-n // WIRE_TILE)
        table = padded(4 * tiles)
        sound = _tiles_are_sound(
            payload[: 4 * tiles].view(np.uint32), payload[table : table + 2 * count].view(np.uint16), n
        )
    else:
        sound = _ascending(payload[: 4 * count].view(np.int32), n)
    if not sound:
        raise WireError(
            f"{index_codec.name}: positions are not strictly ascending within the bucket's {n} elements. "
            "The message is damaged, or was written for another layout."
        )
    if form.values == VALUES_FLOAT16:
        exponent = int(payload[used : used + 4].view(np.int32)[0])
        if not -163 <= exponent <= 113:
            raise WireError(f"float16: the scale's exponent is {exponent}, it must be in -163..113")


@entry()
def _tiles_are_sound(counts: np.ndarray, offsets: np.ndarray, n: int) -> bool:
    at = 0
    for tile in range(len(counts)):
        stop = at + int(counts[tile])
        if stop > len(offsets):
            return False
        last = -1
        while at < stop:
            here = int(offsets[at])
            if here <= last:
                return False
            last = here
            at += 1
        if tile * WIRE_TILE + last >= n:
            return False
    return at == len(offsets)


@entry()
def _ascending(positions: np.ndarray, n: int) -> bool:
    last = -1
    for position in positions:
        if position <= last:
            return False
        last = position
    return last < n
