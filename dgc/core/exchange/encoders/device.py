"""One bucket in one step where gradients, u, v and results are on a device.

What crosses is the message (or, for codecs that the device does not know and for dense sums, the entries and the dense
vector), once there and once back; the exchange between the two, on page-locked host memory, is that of the CPU.

Formats that the device writes and reads itself are checked here before it reads; others (bit-packed, quantised) are
written and read on the host, from entries that are copied there and back.

n elements of a bucket's sparsified part, k entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc.core.exchange.bucket import BucketStep
from dgc.core.exchange.records import Outcome, StepContext, Submission, submitted
from dgc.core.kernels.compile import entry
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.core.kernels.gpu.tables import INDICES_UINT16, VALUES_FLOAT16, WIRE_TILE, DenseTensor, Format
from dgc.core.state.state import BucketState
from dgc.core.wire import IndexCodec, IndexCodecId, ValueCodec, ValueCodecId, padded
from dgc.core.wire.message import Incoming, blaming
from dgc.core.wire.plan import BucketPlan, Mode
from dgc.errors import WireError

_INDICES = {int(IndexCodecId.INT32): 0, int(IndexCodecId.UINT16): INDICES_UINT16}
_VALUES = {
    int(ValueCodecId.FLOAT32): 0,
    int(ValueCodecId.FLOAT64): 1,
    int(ValueCodecId.FLOAT16): VALUES_FLOAT16,
    int(ValueCodecId.BFLOAT16): 3,
}


class DeviceBucketStep(BucketStep):
    """:class:`~dgc.core.exchange.bucket.BucketStep` with whole buckets handed to the device's kernels.

    Waits for the device once before the message leaves; a second time when a threshold was of no use, when the codecs
    are not the device's, and for clipping. Results are complete only when the kernels' stream has reached them.
    """

    begins_early = False

    _kernels: DeviceKernels
    _started: BucketPlan | None = None
    _packed = False

    def await_gradients(self, given: Sequence[Submission | None]) -> None:
        """Let the kernels' stream wait for this bucket's gradients, results and parameters."""
        for segment in self._bucket.segments:
            ready = submitted(given, segment).ready
            if ready is not None:
                self._kernels.runtime.wait_for(ready.handle)

    def overflows(self, context: StepContext, state: BucketState, given: Sequence[Submission | None]) -> bool:
        """See :meth:`BucketStep.overflows`. Waits, but only for parameters of a narrow type."""
        plan = self.plan(context.density)
        tensors = [t for t in self._dense_tensors(plan, context, given) if t.limit is not None]
        if plan.mode is not Mode.DENSE:
            sparse = [submitted(given, s) for s in self._bucket.sparse]
            tensors += [DenseTensor(result=i.result, limit=i.limit) for i in sparse if i.limit is not None]
        return self._kernels.exceeds(tensors, self._vector, state.u)

    def _start(self, plan: BucketPlan, context: StepContext) -> None:
        if self._started is not plan:
            # Buffers are about to be replaced, and the last step's copies from them may still be under way.
            self._kernels.wait()
            self._started = plan
        super()._start(plan, context)

    def _compress(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
    ) -> tuple[int, bool]:
        self._packed = False
        form = self._format(plan)
        if form is None:
            return super()._compress(plan, context, state, given, outcome)
        self._start(plan, context)
        done = self._kernels.compress(
            self._work(plan, context, given),
            state.u,
            state.v,
            state.control,
            form,
            self._sender.payload,
            self._gradients(plan, context, given),
            self._vector[: plan.vector_size],
            masking=self._config.momentum_masking,
        )
        outcome.kept = done.kept
        self._packed = True
        if not self._config.error_feedback:
            self._memory.fill(state.v, 0)
        return done.count, done.nonfinite

    def _pack_dense(self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None]) -> bool:
        if plan.vector_size == 0:
            return False
        nonfinite = False
        if not self._packed:
            # In a dense sum of selected entries, the sparsified part is filled already.
            first = 0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - plan.vector_start
            nonfinite = self._kernels.pack(self._gradients(plan, context, given, first), self._vector[first:])
        if plan.inline:
            self._sender.inline(self._vector)
        return nonfinite

    def _write_sparse(
        self,
        plan: BucketPlan,
        context: StepContext,
        given: Sequence[Submission | None],
        messages: list[Incoming],
        share: float,
    ) -> None:
        form = self._format(plan)
        if plan.mode is Mode.SUM:
            tensors = [
                DenseTensor(result=submitted(given, s).result, vector=s.offset, scale=context.loss_scale)
                for s in self._bucket.sparse
            ]
            self._kernels.write(tensors, self._vector)
        elif form is None:
            super()._write_sparse(plan, context, given, messages, share)
        else:
            n = self._bucket.sparse_size
            for message in messages:
                self._check(form, plan, message)
            self._kernels.receive(
                [submitted(given, s).result for s in self._bucket.sparse],
                self._bucket.sparse_offsets,
                n,
                form,
                [(message.payload, message.count) for message in messages],
                share * context.loss_scale,
            )

    def _write_dense(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        refused: bool,
    ) -> None:
        self._kernels.write(self._dense_tensors(plan, context, given, refused), self._vector, state.u)

    def _check(self, form: Format, plan: BucketPlan, message: Incoming) -> None:
        """Refuse a damaged message before anything is applied."""
        with blaming(message.sender, self._bucket.index):
            check_payload(form, message.payload, self._bucket.sparse_size, message.count, plan.codec.indices)

    @staticmethod
    def _format(plan: BucketPlan) -> Format | None:
        """The device's format of this plan's messages, if it writes them itself."""
        if plan.mode is not Mode.SPARSE or not plan.ks:
            return None
        return device_format(plan.codec.indices, plan.codec.values)

    def _gradients(
        self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None], first: int = 0
    ) -> list[DenseTensor]:
        """The dense tensors' way into the vector from its place ``first`` on."""
        scale, tensors = 1.0 / context.loss_scale, []
        for segment in self._dense_segments(plan):
            clip = 1.0 if context.clip is None else context.clip[segment.parameter]
            place = segment.offset - plan.vector_start - first
            tensors.append(DenseTensor(gradient=submitted(given, segment).gradient, vector=place, scale=scale * clip))
        return tensors

    def _dense_tensors(
        self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None], refused: bool = False
    ) -> list[DenseTensor]:
        """The dense tensors' way out of the vector; in a refused step without momentum and weight decay."""
        hyper, tensors = context.hyper, []
        for segment in self._dense_segments(plan):
            i, item = segment.parameter, submitted(given, segment)
            decay = 0.0 if refused else hyper.weight_decay[i]
            tensors.append(
                DenseTensor(
                    result=item.result,
                    parameter=item.parameter if decay else None,
                    u=segment.offset,
                    vector=segment.offset - plan.vector_start,
                    momentum=0.0 if refused else hyper.momentum[i],
                    nesterov=hyper.nesterov[i],
                    weight_decay=decay,
                    scale=context.loss_scale,
                    limit=item.limit,
                )
            )
        return tensors


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
def _tiles_are_sound(counts, offsets, n):  # type: ignore[no-untyped-def]
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
def _ascending(positions, n):  # type: ignore[no-untyped-def]
    last = -1
    for position in positions:
        if position <= last:
            return False
        last = position
    return last < n
