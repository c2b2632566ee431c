"""One bucket in one step: compress -> message -> collectives -> apply -> commit.

Runs on the communication thread. The results of sparsified tensors are written by :meth:`BucketExchange.run`; those of
dense tensors only once the whole step is known to be finite (:meth:`BucketExchange.finish`), because their momentum
buffer must not take in a refused step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.exchange.encoders import BucketStep, DenseVector, Encoder
from dgc.core.exchange.records import EntrySum, StepContext
from dgc.core.kernels.base import Array, Kernels
from dgc.core.layout import Bucket, Segment
from dgc.core.message import Incoming, Mode, Sender
from dgc.core.state import BucketState, State
from dgc.errors import DGCError


class BucketExchange:
    """Message, dense vector, counters and the error path of one bucket, around its encoder.

    Attributes:
        bucket: its layout.
        encoder: its encoder.
        vector: what is summed densely.
        at: the current step.
        has_run: whether it was exchanged.
    """

    at: BucketStep
    has_run = False

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
        self.bucket = bucket
        self.encoder = encoder
        self.vector = vector
        self._states = state
        self._kernels = kernels
        self._memory = kernels.memory
        self._transport = transport
        self._share = 1.0 / transport.size if op == "average" else 1.0
        self._sender = Sender(bucket.index, transport, self._memory)
        self._elements = sum(s.length for s in bucket.segments)
        self._sparse_elements = sum(s.length for s in bucket.sparse)

    # -- one step ------------------------------------------------------------------------------------------------

    def start(self, step: StepContext) -> None:
        """Begin a step, to which all that follows belongs."""
        state = self._states.buckets[self.bucket.index]
        self.has_run = False
        self.at = BucketStep(step, self.encoder.plan_at(step.density), state, self._sender, self.vector)

    def keep_absent(self) -> None:
        """Copy what the state holds of parameters without a gradient here, before the step changes it."""
        at = self.at
        absent = at.step.submissions.absent
        for segment in self.bucket.segments:
            if segment.parameter in absent:
                at.kept[segment] = [held.copy() for held in self._held(at.state, segment)]

    def run(self) -> None:
        """Exchange the bucket; all its gradients are in."""
        at = self.at
        step, stats = at.step, at.step.stats
        since = time.perf_counter()
        self.encoder.compress(at)
        plan = at.plan
        nonfinite = self.vector.pack(step, plan) or at.flagged
        nonfinite |= self.vector.code_small(plan, at.state, self._sender.coded)
        if plan.inline_bytes:
            self._sender.inline(self.vector.values[plan.plain_start :])
        absent = _digest(at.kept) if at.kept else 0
        self._sender.finish(count=at.count, nonfinite=nonfinite, joined=step.options.joins, absent=absent)
        since = stats.lap("compress", since)
        messages = self._exchange_messages(at)
        for message in messages:
            at.absent.append(message.absent)
            if message.nonfinite:
                at.flagged_by.append(message.sender)
            if message.joined:
                step.joined[message.sender] = message.joined
        at.flagged = bool(at.flagged_by)
        if plan.allreduces:
            plain = self.vector.values[plan.plain_start :]
            self._transport.allreduce(plain, "sum")
            stats.count_collective(plain.nbytes)
        since = stats.lap("exchange", since)
        if plan.vector_size:
            self.vector.add(plan, messages)
            at.flagged |= not self.vector.average(self._share, plan)
        if plan.is_active and not at.flagged:
            if plan.mode is Mode.SUM:
                self.vector.write_sum(step)
            else:
                self.encoder.apply(at, messages, self._share)
        stats.lap("apply", since)
        self.has_run = True
        stats.dense_bytes += self._elements * plan.itemsize
        stats.sparse_elements += self._sparse_elements
        stats.entries_sent += self._sparse_elements if plan.mode is Mode.DENSE else at.count
        if plan.mode is Mode.SPARSE:
            stats.small_bytes += plan.coded_bytes + (plan.vector_size - plan.plain_start) * plan.itemsize

    def send_error(self, error: DGCError, parameter: int | None) -> None:
        """Send a message of normal size that carries an error instead of entries."""
        at = self.at
        self.encoder.catch_up(at)
        at.start_message()
        self._sender.write_error(error, parameter)
        self._exchange_messages(at)

    def finish(self, *, refused: bool, left_alone: Collection[int] = ()) -> None:
        """Write the results of dense tensors and, unless the step is refused, let what was sent leave the residual.

        What no rank has a gradient of is as before the step, its result 0. In a refused step the flagged buckets'
        results become NaN, so that a GradScaler skips the step.
        """
        at = self.at
        for segment in [s for s in at.kept if s.parameter not in left_alone] if at.kept else ():
            del at.kept[segment]
        if at.plan.is_active:
            self.encoder.finish(at, refused=refused)
            if not refused:
                self.encoder.commit(at)
            if not self.encoder.keeps_residual:
                self._memory.fill(at.state.v, 0)
        if refused and at.flagged:
            for item in at.step.submissions.of(self.bucket.segments):
                self._memory.fill(item.result, np.nan)
            self.take_deferred()
        else:
            if not refused:
                self.vector.commit(at.plan, at.state)
            self.vector.write(at.step, at.state.u, refused=refused)
            for segment in at.kept:
                self._memory.fill(at.step.submissions[segment.parameter].result, 0)
            if refused or at.deferred is None:
                self.write_deferred()
        if at.kept:
            self._put_back(at.state)

    def take_deferred(self) -> EntrySum | None:
        """The results of the latest step that were not written; only once. Its gradients are let go."""
        if not self.has_run:
            return None
        at = self.at
        for segment in self.bucket.segments:
            at.step.submissions.pop(segment.parameter, None)
        deferred, at.deferred = at.deferred, None
        return deferred

    def write_deferred(self) -> None:
        """Write them where they were to go."""
        if self.has_run and self.at.deferred is not None:
            self.at.deferred.write(self.at.step, self._kernels)
        self.take_deferred()

    def refusal(self, own: int, names: Sequence[str]) -> str:
        """What a user reads on rank ``own`` about a step that is refused for this bucket's values."""
        at = self.at
        if own in at.flagged_by or not at.flagged_by:
            gradients = {s.parameter: at.step.submissions[s.parameter].gradient for s in self.bucket.segments}
            worst = max(gradients, key=lambda parameter: _worst(gradients[parameter]))
            where = f"{self._transport.label(own)} in the gradient of {names[worst]!r}"
        else:
            where = f"{self._transport.label(at.flagged_by[0])}, whose own warning names the parameter"
        return (
            f"NaN, infinity or an overflow in step {at.step.step}, met by {where}: the step is refused, and that "
            "bucket's results are NaN on all ranks, which optimizer.step() writes into the parameters, as in training "
            "without compression. Look for the cause (learning rate, data, float16), give the compressor a GradScaler "
            "(loss_scale=scaler), or do not call step() when a gradient is NaN"
        )

    def _held(self, state: BucketState, segment: Segment) -> list[Array]:
        """Views of all that a state holds of one tensor."""
        held, first = [state.u[segment.slice]], segment.offset - self.bucket.sparse_size
        if first < 0:
            return [*held, state.v[segment.slice], state.thresholds[self.bucket.sparse.index(segment)]]
        return [*held, state.error[first : first + segment.length]] if first < self.bucket.small_size else held

    def _put_back(self, state: BucketState) -> None:
        """Let a state hold again what was kept."""
        for segment, kept in self.at.kept.items():
            for held, values in zip(self._held(state, segment), kept, strict=True):
                held[...] = values
            state.residual_pending |= bool(len(kept) == 2 and kept[1].any())

    def _exchange_messages(self, at: BucketStep) -> Sequence[Incoming]:
        """Gather the messages of all ranks."""
        at.is_out = True
        self._sender.exchange()
        at.step.stats.bytes_sent += at.plan.message_bytes
        at.step.stats.bytes_received += at.plan.message_bytes * (self._transport.size - 1)
        return self._sender.receive()


def _digest(segments: Iterable[Segment]) -> int:
    """64 bits that tell sets of parameters apart; never 0, which stands for none."""
    digest = hashlib.blake2b(np.array([s.parameter for s in segments], np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _worst(gradient: object) -> float:
    """The largest magnitude, infinity for NaN; -1 for an empty array, or one on a device, which is not waited for."""
    if not isinstance(gradient, np.ndarray) or not gradient.size:
        return -1.0
    found = max(float(gradient.max()), -float(gradient.min()))
    return found if found == found else float("inf")
