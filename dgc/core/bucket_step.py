"""One bucket in one step: accumulate -> select -> encode -> transport -> decode -> apply.

Runs on the communication thread. The results of sparsified tensors are written here; those of dense tensors only
once the whole step is known to be finite (:meth:`BucketStep.finish`), because their momentum buffer must not take in
a refused step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.compressors.registry import compressor_class
from dgc.core.config import DGCConfig
from dgc.core.errors import DGCError
from dgc.core.kernels.base import Kernels, SegmentWork, Selection
from dgc.core.kernels.memory import memory_of
from dgc.core.layout import Bucket, Segment
from dgc.core.messages import Incoming, Sender, blaming
from dgc.core.plan import BucketPlan, Mode, make_plan
from dgc.core.state import BucketState
from dgc.core.stats import StepStats
from dgc.core.step import Hyper as Hyper
from dgc.core.step import Outcome, RemoteFailure, StepContext, Submission, submitted
from dgc.core.transport import Transport


class BucketStep:
    """The work on one bucket, with its buffers, reused from step to step."""

    begins_early = True
    """Whether :meth:`begin` does anything."""

    _begun: Callable[[], Selection] | None = None

    def __init__(
        self,
        bucket: Bucket,
        config: DGCConfig,
        kernels: Kernels,
        transport: Transport,
    ) -> None:
        """Allocate nothing yet: buffers come with the first step that needs them."""
        self._bucket = bucket
        self._config = config
        self._kernels = kernels
        self._transport = transport
        self._plans: dict[float | None, BucketPlan] = {}
        self._memory = memory_of(kernels)
        self._sender = Sender(bucket.index, transport, self._memory)
        self._vector = np.empty(0, bucket.dtype)
        self.sent = False
        """Whether this rank's message of the current step is out; an error can no longer be told the others.

        The exchange sets it to False when a step begins.
        """

    @property
    def bucket(self) -> Bucket:
        """The bucket's layout."""
        return self._bucket

    def plan(self, density: float | None) -> BucketPlan:
        """How the bucket travels at ``density`` (None: dense step)."""
        if density not in self._plans:
            self._plans[density] = make_plan(
                self._bucket,
                density=density,
                ranks=self._transport.size,
                indices=self._config.indices,
                values=self._config.values,
                compressor=compressor_class(self._config.algorithm).number,
            )
        return self._plans[density]

    def send_error(self, context: StepContext, error: DGCError, parameter: int | None, stats: StepStats) -> None:
        """Send a message of normal size that carries an error instead of entries.

        Raises:
            RemoteFailure: always; with the first failing rank's error, which may be another's.
        """
        plan = self.plan(context.density)
        self._start(plan, context)
        self._sender.write_error(context.step, error, parameter)
        self._gather(plan, stats)
        self._receive(plan, context)

    def begin(self, context: StepContext, state: BucketState, given: Sequence[Submission | None]) -> None:
        """Let other threads begin to compress, while this one has another bucket to do; :meth:`run` goes on with it."""
        plan = self.plan(context.density)
        if plan.mode is not Mode.DENSE and plan.ks:
            work = self._work(plan, context, given)
            self._begun = self._kernels.begin_selection(work, state.u, state.v, state.control)

    def abandon(self) -> None:
        """Let nobody work on the bucket any more, when :meth:`run` will not come to what :meth:`begin` began."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def await_gradients(self, given: Sequence[Submission | None]) -> None:
        """Let what comes next wait for the gradients of this bucket, where they are computed asynchronously."""

    def run(
        self, context: StepContext, state: BucketState, given: Sequence[Submission | None], stats: StepStats
    ) -> Outcome:
        """Exchange the bucket.

        Args:
            context: the step.
            state: this bucket's u, v and control, updated in place.
            given: by parameter index; those of this bucket are not None.
            stats: the step's counters, added to.

        Returns:
            Whether any rank met a non-finite value, and what a refusal of the step must put back.

        Raises:
            RemoteFailure: a rank sent an error.
            WireError: a message does not belong to this bucket, step or layout.
            TransportError: a collective failed.
        """
        plan = self.plan(context.density)
        outcome = Outcome()
        try:
            with stats.timed("compress"):
                count, nonfinite = self._compress(plan, context, state, given, outcome)
                nonfinite = self._pack_dense(plan, context, given) or nonfinite
                self._sender.finish(context.step, count=count, nonfinite=nonfinite)
            self._gather(plan, stats)
            messages = self._receive(plan, context)
            outcome.flagged = any(m.nonfinite for m in messages)
            if plan.allreduces:
                with stats.timed("exchange"):
                    self._transport.allreduce(self._vector, "sum")
                stats.bytes_sent += self._vector.nbytes
                stats.bytes_received += self._vector.nbytes
            with stats.timed("apply"):
                self._apply(plan, context, given, messages, outcome)
        except BaseException:
            self.take_back(state, outcome)
            raise
        self._count(plan, count, stats)
        return outcome

    def take_back(self, state: BucketState, outcome: Outcome) -> None:
        """Return the sent entries to u and v."""
        if outcome.kept is not None:
            self._kernels.restore(state.u, state.v, outcome.kept)
            outcome.kept = None

    def return_sent(self, context: StepContext, state: BucketState, outcome: Outcome) -> None:
        """After a finished step that nobody applied: what was sent returns to u and v."""
        if self._config.error_feedback:
            self.take_back(state, outcome)

    def finish(
        self,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
        refused: bool,
    ) -> None:
        """Write the results of dense tensors, or, in a refused step, take back what was sent.

        In a refused step the flagged buckets' results become NaN, so that a GradScaler skips the step.
        """
        if outcome.kept is not None:
            outcome.kept.finish()
        if refused:
            self.take_back(state, outcome)
            if outcome.flagged:
                for segment in self._bucket.segments:
                    self._memory.fill(submitted(given, segment).result, np.nan)
                return
        self._write_dense(self.plan(context.density), context, state, given, refused)

    def _write_dense(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        refused: bool,
    ) -> None:
        for segment in self._dense_segments(plan):
            item = submitted(given, segment)
            if refused:
                np.multiply(self._mean_of(plan, segment), context.loss_scale, out=item.result)
            else:
                self._update_dense(plan, context, segment, item, item.result, state.u[segment.slice])

    def _update_dense(
        self,
        plan: BucketPlan,
        context: StepContext,
        segment: Segment,
        item: Submission,
        result: np.ndarray,
        u: np.ndarray,
    ) -> None:
        hyper, i = context.hyper, segment.parameter
        self._kernels.dense_update(
            result,
            self._mean_of(plan, segment),
            u,
            item.parameter,
            momentum=hyper.momentum[i],
            nesterov=hyper.nesterov[i],
            weight_decay=hyper.weight_decay[i],
            scale=context.loss_scale,
        )

    def overflows(self, context: StepContext, state: BucketState, given: Sequence[Submission | None]) -> bool:
        """Whether a result will not fit the narrower type it is cast to (the same answer on every rank)."""
        plan = self.plan(context.density)
        dense = set(self._dense_segments(plan))
        for segment in self._bucket.segments:
            item = submitted(given, segment)
            if item.limit is None or segment.length == 0:
                continue
            if segment in dense:
                result = np.empty_like(item.result)
                self._update_dense(plan, context, segment, item, result, state.u[segment.slice].copy())
            else:
                result = item.result
            if not np.abs(result).max() <= item.limit:
                return True
        return False

    def _compress(
        self,
        plan: BucketPlan,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
    ) -> tuple[int, bool]:
        self._start(plan, context)
        if plan.mode is Mode.DENSE or not plan.ks:
            return 0, False
        begun, self._begun = self._begun, None
        if begun is not None:
            selection = begun()
        else:
            work = self._work(plan, context, given)
            selection = self._kernels.accumulate_and_select(work, state.u, state.v, state.control)
        positions = selection.positions
        values = selection.values
        if plan.mode is Mode.SPARSE:
            decoded = plan.codec.encode(positions, values, self._sender.payload)
        else:
            decoded = plan.codec.roundtrip(positions, values)
            self._vector[: self._bucket.sparse_size] = 0
            self._vector[positions] = decoded
        # Not waited for: the message goes out first.
        outcome.kept = self._kernels.mask(
            state.u, state.v, positions, decoded, masking=self._config.momentum_masking, wait=False
        )
        if not self._config.error_feedback:
            outcome.kept.finish()
            self._memory.fill(state.v, 0)
        return len(positions), selection.nonfinite

    def _start(self, plan: BucketPlan, context: StepContext) -> None:
        """Begin a message, with buffers of the plan's sizes."""
        self._sender.start(plan, context.fingerprint)
        if plan.vector_size and self._vector.size != plan.vector_size:
            self._vector = self._memory.host_array(plan.vector_size, self._bucket.dtype)

    def _work(self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None]) -> list[SegmentWork]:
        hyper, scale = context.hyper, 1.0 / context.loss_scale
        share = 1.0 / self._transport.size if self._config.op == "sum" else 1.0
        work = []
        for segment, k in zip(self._bucket.sparse, plan.ks, strict=True):
            i, item = segment.parameter, submitted(given, segment)
            decay = hyper.weight_decay[i] * share
            work.append(
                SegmentWork(
                    gradient=item.gradient,
                    parameter=item.parameter if decay else None,
                    offset=segment.offset,
                    length=segment.length,
                    k=k,
                    momentum=hyper.momentum[i],
                    nesterov=hyper.nesterov[i],
                    weight_decay=decay,
                    scale=scale if context.clip is None else scale * context.clip[i],
                )
            )
        return work

    def _pack_dense(self, plan: BucketPlan, context: StepContext, given: Sequence[Submission | None]) -> bool:
        """Copy the dense tensors' gradients into the vector; returns whether one is not finite."""
        if plan.vector_size == 0:
            return False
        vector, start = self._vector, plan.vector_start
        # In a dense sum of selected entries, the sparsified part is filled already; padding must be 0 elsewhere.
        vector[0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - start :] = 0
        nonfinite = False
        for segment in self._dense_segments(plan):
            item = submitted(given, segment)
            place = vector[segment.offset - start : segment.offset - start + segment.length]
            scale = 1.0 / context.loss_scale
            if context.clip is not None:
                scale *= context.clip[segment.parameter]
            if scale == 1.0:
                place[...] = item.gradient
            else:
                np.multiply(item.gradient, vector.dtype.type(scale), out=place, dtype=vector.dtype)
            # One pass without temporaries: a float64 sum of finite float32 values cannot overflow.
            with np.errstate(invalid="ignore", over="ignore"):
                nonfinite |= not np.isfinite(place.sum(dtype=np.float64)) and not np.isfinite(place).all()
        if plan.inline:
            self._sender.inline(vector)
        return nonfinite

    def _dense_segments(self, plan: BucketPlan) -> tuple[Segment, ...]:
        return self._bucket.segments if plan.mode is Mode.DENSE else self._bucket.dense

    def _gather(self, plan: BucketPlan, stats: StepStats) -> None:
        self.sent = True
        with stats.timed("exchange"):
            self._sender.exchange()
        stats.bytes_sent += plan.message_bytes
        stats.bytes_received += plan.message_bytes * (self._transport.size - 1)

    def _receive(self, plan: BucketPlan, context: StepContext) -> list[Incoming]:
        messages = self._sender.receive(context.step)
        for message in messages:
            if message.error is not None:
                raise RemoteFailure(message.error)
        return messages

    def _apply(
        self,
        plan: BucketPlan,
        context: StepContext,
        given: Sequence[Submission | None],
        messages: list[Incoming],
        outcome: Outcome,
    ) -> None:
        if plan.vector_size and plan.inline:
            self._vector.fill(0)
            for message in messages:
                self._vector += message.inline.view(self._vector.dtype)
        share = 1.0 / self._transport.size if self._config.op == "average" else 1.0
        if plan.vector_size:
            if share != 1.0:
                self._vector *= self._vector.dtype.type(share)
            with np.errstate(invalid="ignore", over="ignore"):
                finite = np.isfinite(self._vector.sum(dtype=np.float64)) or np.isfinite(self._vector).all()
            outcome.flagged = outcome.flagged or not finite
        if not plan.ks or outcome.flagged:
            return
        self._write_sparse(plan, context, given, messages, share)

    def _write_sparse(
        self,
        plan: BucketPlan,
        context: StepContext,
        given: Sequence[Submission | None],
        messages: list[Incoming],
        share: float,
    ) -> None:
        results = [submitted(given, s).result for s in self._bucket.sparse]
        if plan.mode is Mode.SUM:
            for segment, result in zip(self._bucket.sparse, results, strict=True):
                np.multiply(self._vector[segment.slice], context.loss_scale, out=result)
            return
        for result in results:
            self._memory.fill(result, 0)
        for message in messages:
            with blaming(message.sender, self._bucket.index):
                positions, values = plan.codec.decode(message.payload, message.count)
                self._kernels.scatter_add(
                    results, self._bucket.sparse_offsets, positions, values, share * context.loss_scale
                )

    def _mean_of(self, plan: BucketPlan, segment: Segment) -> np.ndarray:
        start = segment.offset - plan.vector_start
        return self._vector[start : start + segment.length]

    def _count(self, plan: BucketPlan, count: int, stats: StepStats) -> None:
        itemsize = 8 if self._bucket.dtype == "float64" else 4
        stats.dense_bytes += itemsize * sum(s.length for s in self._bucket.segments)
        elements = sum(s.length for s in self._bucket.sparse)
        stats.sparse_elements += elements
        stats.entries_sent += elements if plan.mode is Mode.DENSE else count
