"""One bucket: its parts (:class:`BucketExchange`), and what happens to it in a step (:class:`BucketStep`).

Gradients -> u, v and the dense vector -> message -> collectives -> results -> commit. The communication thread runs a
step up to the results of sparsified tensors. The caller's thread writes the results of dense tensors, in
:meth:`BucketStep.finish`, when it knows whether all values of the step are finite: a refused step must not change
their momentum.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.compressors.base import DenseValues, SparseValues
from dgc.core.config import DGCConfig
from dgc.core.exchange.dense import DenseVector
from dgc.core.exchange.encoders import Encoder
from dgc.core.exchange.entries import EntrySum
from dgc.core.exchange.owners import Owners
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Array, Kernels, SegmentWork, Selection, is_finite
from dgc.core.layout import Bucket, Segment
from dgc.core.message import Incoming, Messages, Mode
from dgc.core.state import BucketState, State
from dgc.errors import DGCError, LayoutError, WireError


class BucketExchange:
    """The parts of one bucket that last for all steps: places, encoder, message and dense vector.

    Attributes:
        at: the bucket in its latest step.
    """

    at: BucketStep

    def __init__(
        self, bucket: Bucket, encoder: Encoder, state: State, config: DGCConfig, kernels: Kernels, transport: Transport
    ) -> None:
        self.bucket, self.encoder = bucket, encoder
        self.kernels, self.memory, self.transport = kernels, kernels.memory, transport
        self.messages = Messages(bucket.index, transport, kernels.memory)
        self.own_share = state.own_share
        self.owners = Owners(bucket, transport, kernels)
        self.vector = DenseVector(bucket, kernels, state.own_share, config.error_feedback)
        self.factor = 1.0 / transport.size if config.op == "average" else 1.0
        self.elements = sum(s.length for s in bucket.segments)
        self.sparse_elements = sum(s.length for s in bucket.sparse)
        self._states = state

    def start(self, step: Step) -> None:
        """Begin a step."""
        self.at = BucketStep(self, step, self._states.buckets[self.bucket.index])

    def await_gradients(self, step: Step) -> None:
        """Make the device wait for the bucket's gradients."""
        for event in step.submissions.events.get(self.bucket.index, ()):
            self.kernels.wait_for(event.handle)


class BucketStep:
    """One bucket in one step.

    Attributes:
        step: the step, which all buckets share.
        plan: how the bucket is sent.
        count: entries that this rank sends, in its message or to owners.
        flagged: whether a value is not finite on this rank; after the exchange, on any rank.
        flagged_by: the ranks that met such a value before they sent their message.
        is_out: whether this rank has sent its message. After that, the message cannot report an error any more.
        has_run: whether the bucket was exchanged.
        absent: after the exchange, each rank's digest of its parameters without a gradient.
        kept: for each segment without a gradient on this rank, a copy of its state before the step.
        dealt: the entries that this rank has sent to the owners, if they add up entries.
    """

    def __init__(self, parts: BucketExchange, step: Step, state: BucketState) -> None:
        self.plan = parts.encoder.plan_at(step.density)
        self.count = 0
        self.flagged = self.is_out = self.has_run = False
        self.flagged_by: list[int] = []
        self.absent: list[int] = []
        self.kept: dict[Segment, list[Array]] = {}
        self.dealt: SparseValues | None = None
        self.step, self._parts, self._state = step, parts, state
        self._segments = parts.bucket.segments
        self._packing: Callable[[], bool] | None = None
        self._begun: Callable[[], Selection] | None = None
        self._deferred: EntrySum | None = None
        self._is_prepared = parts.owners.are_out = False

    # -- on the communication thread -----------------------------------------------------------------------------------

    def keep_absent(self) -> None:
        """Copy the state of the parameters that have no gradient here, before the step changes it."""
        absent = self.step.submissions.absent
        for segment in self._segments:
            if segment.parameter in absent:
                self.kept[segment] = [held.copy() for held in self._state.held(segment)]

    def begin(self) -> None:
        """Let other threads or a device begin to compress this bucket while this thread works on another one."""
        self._prepare()
        self._packing = self._parts.vector.begin_packing(self.step)
        if self.plan.is_active:
            self._begun = self._parts.encoder.begin(self._work(), self._state)

    def settle(self) -> None:
        """Wait for the work that :meth:`begin` has begun, if nothing else has waited for it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def run(self) -> None:
        """Exchange the bucket, whose gradients have all arrived, and write the results of sparsified tensors."""
        stats = self.step.stats
        since = time.perf_counter()
        count, nonfinite = self._compress()
        since = stats.lap("compress", since)
        if self.plan.dealing:
            count, overflows = self._reduce()
            nonfinite |= overflows
        self._finish_message(count, nonfinite)
        messages = self._gather()
        for message in messages:
            self.absent.append(message.absent)
            if message.nonfinite:
                self.flagged_by.append(message.sender)
            if message.joined:
                self.step.joined[message.sender] = message.joined
        self.flagged = bool(self.flagged_by)
        if self.plan.allreduces:
            plain = self._parts.vector.plain
            self._parts.transport.allreduce(plain, "sum")
            stats.count_collective(plain.nbytes)
        since = stats.lap("exchange", since)
        self._sum(messages)
        stats.lap("apply", since)
        self.has_run = True
        self._count()

    def send_error(self, error: DGCError, parameter: int | None) -> None:
        """Send a message of normal size that carries an error instead of entries."""
        if self.plan.is_active:
            self._parts.encoder.catch_up(self.step)
        if self.plan.dealing and not self._parts.owners.are_out:
            self._parts.owners.send_nothing(self.plan)
            self._count_parts()
        self._parts.messages.start(self.plan, self.step.number, self.step.fingerprint)
        self._parts.messages.write_error(error, parameter)
        self._gather()

    def _compress(self) -> tuple[int, bool]:
        """Write this rank's message and dense vector.

        Returns:
            The number of entries, and whether a value is not finite.
        """
        plan, vector, messages = self.plan, self._parts.vector, self._parts.messages
        messages.start(plan, self.step.number, self.step.fingerprint)
        self._prepare()
        nonfinite = False
        if plan.is_active:
            begun, self._begun = self._begun, None
            work = [] if begun else self._work()
            encode = self._parts.encoder.encode
            self.count, nonfinite = encode(plan, self.step, work, self._state, messages.payload, begun)
            if plan.mode is Mode.SUM:
                self._fill(vector.values, self._parts.encoder.selected(plan))
        nonfinite |= (self._packing or vector.begin_packing(self.step))()
        blocks = self._parts.owners.small_blocks if plan.dealing else [messages.coded] if plan.small else []
        nonfinite |= not vector.code_small(self._state, blocks)
        if plan.inline_bytes:
            messages.inline(vector.plain)
        return self.count, nonfinite

    def _prepare(self) -> None:
        """Prepare the buffers, once. Move the sums that this rank owns into its residuals if it does not send them."""
        if self._is_prepared:
            return
        plan, self._is_prepared = self.plan, True
        self._parts.vector.start(plan)
        if plan.dealing:
            self._parts.owners.start(plan)
        if self.step.density is not None:
            self._state.return_owned(sparse=plan.dealing is None, small=not (plan.dealing and plan.dealing.small))

    def _reduce(self) -> tuple[int, bool]:
        """Send selected entries to their owners; put the sums that this rank owns into its message.

        Returns:
            The number of sums, and whether one is not finite.
        """
        owners, selected = self._parts.owners, self._parts.encoder.selected(self.plan)
        assert isinstance(selected, SparseValues), "the plan is one of selected entries"
        self.dealt = owners.write_parts(selected)
        self.count = self.dealt.positions.size
        owners.exchange()
        self._count_parts()
        messages = self._parts.messages
        return owners.add_up(self._state, messages.payload, messages.coded)

    def _finish_message(self, count: int, nonfinite: bool) -> None:
        absent, joins = _digest(self.kept) if self.kept else 0, self.step.options.joins
        self._parts.messages.finish(count=count, nonfinite=nonfinite, joined=joins, absent=absent)

    def _work(self) -> list[SegmentWork]:
        """Return the kernels' work on each sparsified tensor of the bucket."""
        step, hyper, work = self.step, self.step.hyper, []
        for segment, k in zip(self._parts.bucket.sparse, self.plan.ks, strict=True):
            i = segment.parameter
            item, decay = step.submissions[i], hyper.weight_decay[i] * self._parts.own_share
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
                    scale=step.scales[i],
                )
            )
        return work

    def _fill(self, vector: np.ndarray, own: SparseValues | DenseValues) -> None:
        """Write the values that this rank sends into the sparsified tensors' part of the vector."""
        vector[: self._parts.bucket.sparse_size] = 0
        if isinstance(own, SparseValues):
            vector[own.positions] = own.values
            return
        for segment, values in zip(self._parts.bucket.sparse, own.values, strict=True):
            vector[segment.slice] = values

    def _gather(self) -> Sequence[Incoming]:
        """Exchange the messages; return those of all ranks."""
        parts, stats = self._parts, self.step.stats
        self.is_out = True
        parts.messages.exchange()
        stats.bytes_sent += self.plan.message_bytes
        stats.bytes_received += self.plan.message_bytes * (parts.transport.size - 1)
        return parts.messages.receive()

    def _count_parts(self) -> None:
        assert self.plan.dealing is not None
        self.step.stats.count_collective(self.plan.dealing.part_bytes * (self._parts.transport.size - 1))

    def _sum(self, messages: Sequence[Incoming]) -> None:
        """Add up what the ranks have sent, and write the results of sparsified tensors."""
        plan, vector = self.plan, self._parts.vector
        if plan.vector_size:
            vector.add(messages)
            self.flagged |= not vector.average(self._parts.factor)
        if not plan.is_active or self.flagged:
            return
        if plan.mode is Mode.SUM:
            vector.write_selected(self.step)
            return
        factor = self._parts.factor * self.step.loss_scale
        decoded: list[Any] = [self._decode(message) for message in messages]
        if isinstance(decoded[0], SparseValues):
            total = EntrySum.of(self._parts.bucket, [(each.positions, each.values) for each in decoded], factor)
            self.flagged = not np.isfinite(total.values).all()
            self._deferred = total
            if not self.step.options.defers or self.flagged or all(self.absent):
                self._write_entries()
            return
        results = self.step.submissions.results(self._parts.bucket.sparse)
        for result in results:
            result.fill(0)
        for each in decoded:
            for result, values in zip(results, each.values, strict=True):
                result += values * result.dtype.type(factor)
        self.flagged = not all(is_finite(result) for result in results)

    def _decode(self, message: Incoming) -> SparseValues | DenseValues:
        try:
            if self.plan.dealing:
                return self._parts.owners.decode(message)
            return self._parts.encoder.decode(self.plan, message.payload, message.count)
        except (WireError, LayoutError) as error:
            raise message.damaged(error) from error

    def _count(self) -> None:
        plan, parts, stats = self.plan, self._parts, self.step.stats
        stats.dense_bytes += parts.elements * plan.itemsize
        stats.sparse_elements += parts.sparse_elements
        stats.entries_sent += parts.sparse_elements if plan.mode is Mode.DENSE else self.count
        if plan.mode is Mode.SPARSE:
            stats.small_bytes += (parts.transport.size - 1) * plan.dealing.small_bytes if plan.dealing else 0
            stats.small_bytes += plan.coded_bytes + (plan.vector_size - plan.plain_start) * plan.itemsize

    # -- on the caller's thread ----------------------------------------------------------------------------------------

    def overflows(self) -> bool:
        """Return whether a result is too large for the narrower type that it is cast to; the same on every rank."""
        self.flagged = self._parts.vector.overflows(self.step, self._state.u)
        return self.flagged

    def finish(self, *, refused: bool, left_alone: Collection[int] = ()) -> None:
        """Write the results of dense tensors. Unless the step is refused, remove what was sent from the residual.

        If no rank has a gradient of a parameter (``left_alone``), its state is restored and its result is 0. In a
        refused step the flagged buckets' results become NaN, so that a GradScaler skips the step.
        """
        parts, state, submissions = self._parts, self._state, self.step.submissions
        self.kept = {s: kept for s, kept in self.kept.items() if s.parameter in left_alone} if self.kept else {}
        if self.plan.is_active:
            parts.encoder.finish(self.plan, state, refused=refused)
            if not refused:
                self._commit()
            if not parts.encoder.keeps_residual:
                parts.memory.fill(state.v, 0)
        if refused and self.flagged:
            for result in submissions.results(self._segments):
                parts.memory.fill(result, np.nan)
            self.take_deferred()
        else:
            if not refused:
                parts.vector.commit(state)
            parts.vector.write(self.step, state.u, refused=refused)
            for result in submissions.results(list(self.kept)):
                parts.memory.fill(result, 0)
            if refused or self._deferred is None:
                self.write_deferred()
        if self.kept:
            self._put_back()

    def _commit(self) -> None:
        """Subtract what was sent from v, and mask momentum."""
        encoder, state = self._parts.encoder, self._state
        if self.dealt is not None and encoder.keeps_residual:
            state.w[...] = self._parts.owners.next_w
            state.owned_error[...] = self._parts.owners.next_owned_error
        masking = encoder.masks(self.plan, self.count)
        if not (encoder.keeps_residual or masking):
            return
        own = encoder.selected(self.plan) if self.dealt is None else self.dealt
        if isinstance(own, SparseValues):
            self._parts.kernels.take_out(state.u, state.v, own.positions, own.values, masking=masking)
            return
        for segment, values in zip(self._parts.bucket.sparse, own.values, strict=True):
            state.v[segment.slice] -= values

    def take_deferred(self) -> EntrySum | None:
        """Return the sum of entries that was not written. Drop it here, together with the step's gradients."""
        if not self.has_run:
            return None
        for segment in self._segments:
            self.step.submissions.pop(segment.parameter, None)
        self._parts.vector.release()
        deferred, self._deferred = self._deferred, None
        return deferred

    def write_deferred(self) -> None:
        """Write the sum of entries into the results."""
        self._write_entries()
        self.take_deferred()

    def _write_entries(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.write(self.step.submissions.results(self._parts.bucket.sparse), self._parts.kernels)

    def refusal(self, own: int, names: Sequence[str]) -> str:
        """Return the warning for the user of rank ``own`` about a step that is refused because of this bucket."""
        label = self._parts.transport.label
        if own in self.flagged_by or not self.flagged_by:
            gradients = {s.parameter: self.step.submissions[s.parameter].gradient for s in self._segments}
            worst = max(gradients, key=lambda parameter: _worst(gradients[parameter]))
            where = f"{label(own)} in the gradient of {names[worst]!r}"
        else:
            where = f"{label(self.flagged_by[0])}, whose own warning names the parameter"
        return (
            f"NaN, infinity or an overflow in step {self.step.number}, met by {where}: the step is refused, and that "
            "bucket's results are NaN on all ranks, which optimizer.step() writes into the parameters, as in training "
            "without compression. Look for the cause (learning rate, data, float16), give the compressor a GradScaler "
            "(loss_scale=scaler), or do not call step() when a gradient is NaN"
        )

    def _put_back(self) -> None:
        """Restore the state of the parameters in ``kept``."""
        for segment, kept in self.kept.items():
            for held, values in zip(self._state.held(segment), kept, strict=True):
                held[...] = values
            self._state.residual_pending |= bool(self._state.error_of(segment).any())


def _digest(segments: Iterable[Segment]) -> int:
    """Return a 64-bit digest of a set of parameters; never 0, because 0 stands for no parameters."""
    digest = hashlib.blake2b(np.array([s.parameter for s in segments], np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _worst(gradient: object) -> float:
    """Return the largest magnitude; infinity if there is a NaN, and -1 for an empty array or one on a device."""
    if not isinstance(gradient, np.ndarray) or not gradient.size:
        return -1.0
    found = max(float(gradient.max()), -float(gradient.min()))
    return found if found == found else float("inf")
