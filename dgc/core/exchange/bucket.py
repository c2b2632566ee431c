"""One bucket in one step: compress -> message -> collectives -> apply, and commit once the step counts.

Runs on the communication thread. The results of sparsified tensors are written by :meth:`BucketExchange.run`; those of
dense tensors only once the whole step is known to be finite (:meth:`BucketExchange.finish`), because their momentum
buffer must not take in a refused step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.exchange.encoders.base import BucketStep, Buffers, Encoder, largest
from dgc.core.exchange.encoders.dense_vector import DenseVector
from dgc.core.exchange.records import EntrySum, Outcome, RemoteFailure, StepContext
from dgc.core.kernels.base import Array, Kernels
from dgc.core.state.layout import Bucket
from dgc.core.state.probe import Sent
from dgc.core.state.state import BucketState, State
from dgc.core.transport import Transport
from dgc.core.wire.message import Incoming, Sender
from dgc.core.wire.plan import BucketPlan, Mode
from dgc.errors import DGCError


class BucketExchange:
    """Message, dense vector, counters and the error path of one bucket, around an encoder.

    Attributes:
        bucket: its layout.
        encoder: how its sparsified tensors travel.
        sent: whether this rank's message of the current step is out; an error can no longer be told the others in it.
        outcome: of the current step, once the bucket has run.
    """

    def __init__(
        self,
        bucket: Bucket,
        encoder: Encoder,
        vector: DenseVector,
        state: State,
        kernels: Kernels,
        transport: Transport,
        *,
        op: str,
    ) -> None:
        """Allocate nothing yet: buffers come with the first step that needs them. ``op`` is "average" or "sum"."""
        self.bucket = bucket
        self.encoder = encoder
        self.sent = False
        self.outcome: Outcome | None = None
        self._vector = vector
        self._states = state
        self._kernels = kernels
        self._memory = kernels.memory
        self._transport = transport
        self._share = 1.0 / transport.size if op == "average" else 1.0
        self._buffers = Buffers(Sender(bucket.index, transport, self._memory), vector)
        self._step: StepContext | None = None
        self._at: BucketStep | None = None

    # -- one step ------------------------------------------------------------------------------------------------

    def start(self, step: StepContext) -> None:
        """Begin a step, to which all that follows belongs."""
        self.sent = False
        self.outcome = self._at = None
        self._step = step

    @property
    def plan(self) -> BucketPlan:
        """How the bucket is sent in this step."""
        return self._current.plan

    def begin(self) -> None:
        """Let other threads begin to compress, while this one has another bucket to do; :meth:`run` goes on with it."""
        self.encoder.begin(self._current)

    def run(self) -> None:
        """Exchange the bucket; all its gradients are in.

        Raises:
            RemoteFailure: a rank sent an error.
            WireError: a message does not belong to this bucket, step or layout.
            TransportError: a collective failed.
        """
        at = self._current
        step, outcome = at.step, at.outcome
        with step.stats.timed("compress"):
            self._write_message(at)
        plan = at.plan
        messages = self._exchange_messages(at)
        outcome.flagged_by = tuple(m.sender for m in messages if m.nonfinite)
        outcome.flagged = bool(outcome.flagged_by)
        step.joined = {m.sender: m.joined for m in messages if m.joined}
        if plan.allreduces:
            plain = self._vector.values[plan.plain_start :]
            with step.stats.timed("exchange"):
                self._transport.allreduce(plain, "sum")
            step.stats.count_collective(plain.nbytes)
        with step.stats.timed("apply"):
            self._apply(at, messages)
        self.outcome = outcome
        self._count(at)

    def send_error(self, error: DGCError, parameter: int | None) -> None:
        """Send a message of normal size that carries an error instead of entries.

        Raises:
            RemoteFailure: always; with the first failing rank's error, which may be another's.
        """
        at = self._current
        self.encoder.catch_up(at)
        self._buffers.start(at.step, at.plan)
        self._buffers.sender.write_error(at.step.step, error, parameter)
        self._exchange_messages(at)

    def overflows(self) -> Callable[[], bool]:
        """Ask whether a result will not fit the narrower type it is cast to (the same answer on every rank).

        What comes back answers, and flags the outcome: once all buckets have been asked, a device is waited for once.
        """
        at = self._current
        answer = self._vector.overflows(at.step, at.plan, at.state.u)

        def flagged() -> bool:
            self.required_outcome.flagged = answer()
            return self.required_outcome.flagged

        return flagged

    def finish(self, *, refused: bool) -> None:
        """Write the results of dense tensors.

        In a refused step the flagged buckets' results become NaN, so that a GradScaler skips the step.
        """
        at, outcome = self._current, self.required_outcome
        self.encoder.finish(at, refused=refused)
        if refused and outcome.flagged:
            for item in at.step.submissions.of(self.bucket.segments):
                self._memory.fill(item.result, np.nan)
            self.take_deferred()
            return
        if not refused:
            self._vector.commit(at.plan, at.state)
        self._vector.write(at.step, at.plan, at.state.u, refused=refused)
        if refused or outcome.deferred is None:
            self.write_deferred()

    def commit(self) -> None:
        """Let what was sent leave the residual; again does nothing."""
        if self.outcome is not None and not self.outcome.committed:
            self.outcome.committed = True
            self.encoder.commit(self._current, self._state)

    def commit_to(self, copy: BucketState) -> Array | None:
        """Let what was sent leave a copy of the residual, unless it has left that already.

        Returns:
            (k,) positions of what was sent; None for all of them or none.
        """
        if self.outcome is None or self.outcome.committed:
            return None
        return self.encoder.commit(self._current, copy)

    def take_deferred(self) -> EntrySum | None:
        """The results of the latest step that were not written; only once. Its gradients are let go."""
        if self.outcome is None or self._step is None:
            return None
        deferred, self.outcome.deferred = self.outcome.deferred, None
        self._step.submissions.release(self.bucket.segments)
        return deferred

    def write_deferred(self) -> None:
        """Write them where they were to go."""
        if self.outcome is not None and self._step is not None and self.outcome.deferred is not None:
            self.outcome.deferred.write(self._step, self._kernels)
        self.take_deferred()

    def probe(self) -> Sent | str:
        """Copy the residual before and after the commit of a finished step to the host; or say why there is none."""
        if (empty := self.encoder.why_empty(self._current)) is not None:
            return empty
        after = self._state.copy()
        positions = self.commit_to(after)
        values = self._memory.to_host(self._state.v), self._memory.to_host(after.v)
        if positions is not None and not isinstance(positions, np.ndarray):
            positions = self._memory.to_host(positions)
        return Sent(positions, *values)

    def refusal(self, own: int, names: Sequence[str]) -> str:
        """What a user reads on rank ``own`` about a step that is refused for this bucket's values."""
        step = self._current.step
        ranks = self.required_outcome.flagged_by
        if own in ranks or not ranks:
            where = f"{self._transport.label(own)} in the gradient of {names[self._worst_parameter(step)]!r}"
        else:
            where = f"{self._transport.label(ranks[0])}, whose own warning names the parameter"
        return (
            f"NaN, infinity or an overflow in step {step.step}, met by {where}: the step is refused, and that bucket's "
            "results are NaN on all ranks, which optimizer.step() writes into the parameters, as in training without "
            "compression. Look for the cause (learning rate, data, float16), give the compressor a GradScaler "
            "(loss_scale=scaler), or do not call step() when a gradient is NaN"
        )

    @property
    def required_outcome(self) -> Outcome:
        """:attr:`outcome` of a bucket that has run."""
        assert self.outcome is not None, "the bucket has run"
        return self.outcome

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> BucketState:
        return self._states.buckets[self.bucket.index]

    @property
    def _current(self) -> BucketStep:
        if self._at is None:
            assert self._step is not None, "a step has begun"
            self._at = BucketStep(self._step, self.encoder.plan(self._step), self._state, self._buffers)
        return self._at

    def _worst_parameter(self, step: StepContext) -> int:
        """The parameter whose gradient is not finite, or else has the largest entry."""
        size = {s.parameter: _worst(step.submissions[s.parameter].gradient) for s in self.bucket.segments}
        return max(size, key=lambda parameter: size[parameter])

    def _write_message(self, at: BucketStep) -> None:
        self.encoder.compress(at)
        nonfinite = self._vector.pack(at.step, at.plan) or at.outcome.flagged
        sender = self._buffers.sender
        nonfinite |= self._vector.code_small(at.plan, at.state, sender.coded)
        if at.plan.inline_bytes:
            sender.inline(self._vector.values[at.plan.plain_start :])
        sender.finish(at.step.step, count=at.outcome.count, nonfinite=nonfinite, joined=at.step.joins)

    def _exchange_messages(self, at: BucketStep) -> Sequence[Incoming]:
        """Gather the messages of all ranks.

        Raises:
            RemoteFailure: a rank sent an error.
        """
        self.sent = True
        step, plan = at.step, at.plan
        with step.stats.timed("exchange"):
            self._buffers.sender.exchange()
        step.stats.bytes_sent += plan.message_bytes
        step.stats.bytes_received += plan.message_bytes * (self._transport.size - 1)
        messages = self._buffers.sender.receive(step.step)
        for message in messages:
            if message.error is not None:
                raise RemoteFailure(message.error)
        return messages

    def _apply(self, at: BucketStep, messages: Sequence[Incoming]) -> None:
        plan, outcome = at.plan, at.outcome
        if plan.vector_size:
            self._vector.add(plan, messages)
            if not self._vector.average(self._share, plan):
                outcome.flagged = True
        if not plan.ks or outcome.flagged:
            return
        if plan.mode is Mode.SUM:
            self._vector.write_sum(at.step, plan)
        else:
            self.encoder.apply(at, messages, self._share)

    def _count(self, at: BucketStep) -> None:
        stats, plan, itemsize = at.step.stats, at.plan, 8 if self.bucket.dtype == "float64" else 4
        stats.dense_bytes += itemsize * sum(s.length for s in self.bucket.segments)
        elements = sum(s.length for s in self.bucket.sparse)
        stats.sparse_elements += elements
        stats.entries_sent += elements if plan.mode is Mode.DENSE else at.outcome.count
        if plan.mode is Mode.SPARSE:
            stats.small_bytes += plan.coded_bytes + (plan.vector_size - plan.plain_start) * plan.itemsize


def _worst(gradient: object) -> float:
    """The largest magnitude, infinity for NaN; -1 for an empty array, or one on a device, which is not waited for."""
    if not isinstance(gradient, np.ndarray) or not gradient.size:
        return -1.0
    found = largest(gradient)
    return found if found == found else float("inf")
