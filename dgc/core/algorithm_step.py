"""One bucket in one step for compressors that are an :class:`~dgc.core.compressors.base.Algorithm`.

What was sent is subtracted from the residual only when the step is over and was not refused: until then v holds
residual and gradient together, and a refused or failed step has nothing to put back. Works on host arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.bucket_step import BucketStep
from dgc.core.compressors.base import Algorithm, Entries, Moment, Room, Tensor, Whole
from dgc.core.errors import ConfigError, DGCError
from dgc.core.kernels.base import Kept, Kernels
from dgc.core.layout import Bucket, Layout
from dgc.core.messages import Incoming, blaming
from dgc.core.plan import MIN_MESSAGE_BYTES, BucketPlan, Mode, plan_for
from dgc.core.state import BucketState
from dgc.core.stats import StepStats
from dgc.core.step import Outcome, StepContext, Submission, submitted
from dgc.core.transport import Transport
from dgc.core.wire import HEADER_BYTES, padded


@dataclass(frozen=True)
class _Id:
    """Stands in a plan for a codec of which only the number is asked."""

    id: int


@dataclass(frozen=True)
class _HeaderIds:
    compressor_id: int
    indices: _Id
    values: _Id


class AlgorithmStep(BucketStep):
    """:class:`~dgc.core.bucket_step.BucketStep` around an algorithm.

    Collectives of a step, in this order on every rank: the allreduce of what the ranks share before encoding, if the
    algorithm has that; the allreduce of the longest message, if lengths vary; the messages; the dense vector.
    """

    begins_early = False

    def __init__(
        self, bucket: Bucket, algorithm: Algorithm, kernels: Kernels, transport: Transport, layout: Layout
    ) -> None:
        """Allocate nothing yet.

        Args:
            bucket: the bucket.
            algorithm: shared by all buckets of the model.
            kernels: of the host.
            transport: connects the ranks.
            layout: of the model.

        Raises:
            ConfigError: the kernels work on a device.
        """
        if getattr(kernels, "on_device", False):
            raise ConfigError(f"{algorithm.name!r} works on host memory; give it the kernels of the CPU")
        super().__init__(bucket, algorithm.config, kernels, transport)
        self._algorithm = algorithm
        self._tensors = tuple(
            Tensor(layout.parameters[s.parameter].name, layout.parameters[s.parameter].shape, s.offset, s.length)
            for s in bucket.sparse
        )
        self._total = layout.sparse_numel
        self._rooms: dict[float, Room] = {}
        self._own = np.empty(0, np.uint8)
        self._count_sent = 0
        self._fitted: BucketPlan | None = None
        self._shared_in: StepContext | None = None
        self._measured_in: StepContext | None = None

    def plan(self, density: float | None) -> BucketPlan:
        """See :meth:`BucketStep.plan`."""
        if density not in self._plans:
            room = self._room(1.0 if density is None else density)
            algorithm, active = self._algorithm, density is not None and bool(self._tensors)
            ids = algorithm.codec_ids(room) if active else (0, 0)
            self._plans[density] = plan_for(
                self._bucket,
                _HeaderIds(algorithm.number, _Id(ids[0]), _Id(ids[1])),
                algorithm.max_counts(room) if active else (),
                padded(algorithm.max_bytes(room)) if active else 0,
                dense=density is None,
                ranks=self._transport.size,
            )
        return self._plans[density]

    def send_error(self, context: StepContext, error: DGCError, parameter: int | None, stats: StepStats) -> None:
        """See :meth:`BucketStep.send_error`; the collectives before the message are made up for."""
        plan = self.plan(context.density)
        if self._is_active(plan):
            if self._algorithm.shares and self._shared_in is not context:
                self._share(context, np.zeros(len(self._tensors)))
            if self._varies(plan) and self._measured_in is not context:
                self._fit(plan, context, 0)
            plan = self._fitted if self._fitted is not None and self._varies(plan) else plan
        self._start(plan, context)
        self._sender.write_error(context.step, error, parameter)
        self._gather(plan, stats)
        self._receive(plan, context)

    def take_back(self, state: BucketState, outcome: Outcome) -> None:
        """Nothing was taken out of v yet."""

    def finish(
        self,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
        refused: bool,
    ) -> None:
        """See :meth:`BucketStep.finish`; here what was sent leaves the residual, if it counts."""
        plan = self.plan(context.density)
        if self._is_active(plan):
            if not self._algorithm.error_feedback or (not refused and not self._config.error_feedback):
                state.v.fill(0)
            elif not refused:
                outcome.kept = self._subtract(context, state)
            self._algorithm.finish(self._room(context.density), state.control, refused=refused)
        super().finish(context, state, given, outcome, refused)

    def return_sent(self, context: StepContext, state: BucketState, outcome: Outcome) -> None:
        """See :meth:`BucketStep.return_sent`; what was sent is still in this rank's own message."""
        remembers = self._algorithm.error_feedback and self._config.error_feedback
        if not self._is_active(self.plan(context.density)) or not remembers:
            return
        if outcome.kept is not None:
            self._kernels.restore(state.u, state.v, outcome.kept)
            outcome.kept = None
            return
        decoded = self._algorithm.decode(self._own, self._count_sent, self._room(context.density))
        assert isinstance(decoded, Whole)
        for tensor, values in zip(self._tensors, decoded.values, strict=True):
            state.v[tensor.slice] += values

    # -- inside --------------------------------------------------------------------------------------------------

    def _compress(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
    ) -> tuple[int, bool]:
        self._fitted = None
        if not self._is_active(plan):
            self._start(plan, context)
            return 0, False
        algorithm, room = self._algorithm, self._room(context.density)
        moment = Moment(context.step, self._transport.rank, self._config.seed, state.control)
        nonfinite = self._accumulate(plan, context, state, given, moment)
        if algorithm.shares:
            moment.shared = self._share(context, algorithm.prepare(state.v, room))
        in_message = plan.mode is Mode.SPARSE and not self._varies(plan)
        if in_message:
            self._start(plan, context)
            self._own = self._sender.payload
        elif self._own.size != padded(algorithm.max_bytes(room)):
            self._own = np.empty(padded(algorithm.max_bytes(room)), np.uint8)
        count, used = algorithm.encode(state.v, self._own, room, moment)
        self._own[used:] = 0
        self._count_sent = count
        if in_message:
            return count, nonfinite
        if self._varies(plan):
            plan = self._fit(plan, context, used)
        self._start(plan, context)
        if plan.mode is Mode.SPARSE:
            self._sender.payload[...] = self._own[: plan.payload_bytes]
        else:
            self._fill_vector(room)
        return count, nonfinite

    def _accumulate(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        moment: Moment,
    ) -> bool:
        work = self._work(plan, context, given)
        if not self._algorithm.needs_increment:
            return self._kernels.accumulate(work, state.u, state.v)
        moment.increment = np.zeros_like(state.v)
        nonfinite = self._kernels.accumulate(work, state.u, moment.increment)
        state.v += moment.increment
        return nonfinite

    def _share(self, context: StepContext, numbers: np.ndarray) -> np.ndarray:
        """The largest of all ranks of each number."""
        shared = np.ascontiguousarray(numbers, np.float64)
        self._transport.allreduce(shared, "max")
        self._shared_in = context
        return shared

    def _fit(self, plan: BucketPlan, context: StepContext, used: int) -> BucketPlan:
        """The plan with messages as long as the longest of all ranks."""
        longest = np.array([float(used)])
        self._transport.allreduce(longest, "max")
        self._measured_in = context
        payload = padded(int(longest[0]))
        message = max(MIN_MESSAGE_BYTES, HEADER_BYTES + payload + plan.inline_bytes)
        self._fitted = dataclasses.replace(plan, payload_bytes=payload, message_bytes=message)
        return self._fitted

    def _fill_vector(self, room: Room) -> None:
        """Turn this rank's own message into a vector for the dense sum."""
        decoded = self._algorithm.decode(self._own, self._count_sent, room)
        self._vector[: room.size] = 0
        if isinstance(decoded, Entries):
            self._vector[decoded.positions] = decoded.values
            return
        for tensor, values in zip(self._tensors, decoded.values, strict=True):
            self._vector[tensor.slice] = values

    def _subtract(self, context: StepContext, state: BucketState) -> Kept | None:
        """``v -= decoded``, and ``u = 0`` where entries were sent, with masking; returns what was there, of entries."""
        decoded = self._algorithm.decode(self._own, self._count_sent, self._room(context.density))
        if isinstance(decoded, Entries):
            masking = self._config.momentum_masking
            return self._kernels.mask(state.u, state.v, decoded.positions, decoded.values, masking=masking)
        for tensor, values in zip(self._tensors, decoded.values, strict=True):
            state.v[tensor.slice] -= values
        return None

    def _gather(self, plan: BucketPlan, stats: StepStats) -> None:
        plan = self._fitted or plan
        if self._is_active(plan):
            if self._algorithm.shares:
                self._count_collective(8 * len(self._tensors), stats)
            if self._varies(plan):
                self._count_collective(8, stats)
        super()._gather(plan, stats)

    def _write_sparse(
        self,
        plan: BucketPlan,
        context: StepContext,
        given: Sequence[Submission | None],
        messages: list[Incoming],
        share: float,
    ) -> None:
        if plan.mode is Mode.SUM:
            super()._write_sparse(plan, context, given, messages, share)
            return
        room, factor = self._room(context.density), share * context.loss_scale
        results = [submitted(given, s).result for s in self._bucket.sparse]
        decoded = [self._decode(message, room) for message in messages]
        for result in results:
            result.fill(0)
        for each in decoded:
            if isinstance(each, Entries):
                self._kernels.scatter_add(results, self._bucket.sparse_offsets, each.positions, each.values, factor)
                continue
            for result, values in zip(results, each.values, strict=True):
                result += values * result.dtype.type(factor)

    def _decode(self, message: Incoming, room: Room) -> Entries | Whole:
        with blaming(message.sender, self._bucket.index):
            return self._algorithm.decode(message.payload, message.count, room)

    def _room(self, density: float | None) -> Room:
        assert density is not None
        if density not in self._rooms:
            self._rooms[density] = Room(self._bucket, self._tensors, density, self._total)
        return self._rooms[density]

    def _is_active(self, plan: BucketPlan) -> bool:
        return plan.mode is not Mode.DENSE and bool(self._tensors)

    def _varies(self, plan: BucketPlan) -> bool:
        return self._algorithm.varying and plan.mode is Mode.SPARSE

    @staticmethod
    def _count_collective(nbytes: int, stats: StepStats) -> None:
        stats.bytes_sent += nbytes
        stats.bytes_received += nbytes
