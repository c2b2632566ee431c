"""One bucket in a step: select entries, exchange them as the bucket's plan does, write the results, commit.

The communication thread runs a step up to the sums. The caller's thread writes the results, when the backward pass is
over: they share the gradients' memory, which autograd may read until then. :meth:`BucketExchange.finish` writes those
of dense tensors, when it is known whether all values of the step are finite: a refused step must not change their
momentum.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.compressors.base import SparseValues
from dgc.core.config import DGCConfig
from dgc.core.exchange.choice import Plans
from dgc.core.exchange.plan import Plan
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Array, Kernels, SegmentWork
from dgc.core.layout import Bucket, Segment
from dgc.core.message import Flags, Incoming
from dgc.core.state import BucketState, State
from dgc.errors import DGCError


class BucketExchange:
    """One bucket in its latest step.

    Attributes:
        step: the step, which all buckets share.
        plan: how the bucket is exchanged.
        flagged: whether a value is not finite on this rank; after the exchange, on any rank.
        flagged_by: the ranks that met such a value before they sent their message.
        absent: after the exchange, each rank's digest of its parameters without a gradient.
        kept: for each segment without a gradient on this rank, a copy of its state before the step.
    """

    step: Step
    plan: Plan
    flagged: bool
    flagged_by: list[int]
    absent: list[int]
    kept: dict[Segment, list[Array]]
    _state: BucketState

    def __init__(
        self, bucket: Bucket, plans: Plans, states: State, config: DGCConfig, kernels: Kernels, transport: Transport
    ) -> None:
        self.bucket, self.plans = bucket, plans
        self._states, self._kernels, self._memory, self._transport = states, kernels, kernels.memory, transport
        self._factor = 1.0 / transport.size if config.op == "average" else 1.0
        self._elements = sum(s.length for s in bucket.segments)
        self._sparse_elements = sum(s.length for s in bucket.sparse)
        self._prepared: Plan | None = None  # the plan that has buffers

    def start(self, step: Step) -> None:
        """Begin a step."""
        self.step, self.plan = step, self.plans[step.density]
        self.plan.begin(step)
        self._state = self._states.buckets[self.bucket.index]
        self.flagged = False
        self.flagged_by, self.absent, self.kept = [], [], {}
        self._packing: Callable[[], bool] | None = None
        self._begun: Callable[[], Any] | None = None

    # -- on the communication thread -----------------------------------------------------------------------------------

    def await_gradients(self) -> None:
        """Make the device wait for the bucket's gradients."""
        for event in self.step.submissions.events.get(self.bucket.index, ()):
            self._kernels.wait_for(event.handle)

    def keep_absent(self) -> None:
        """Copy the state of the parameters that have no gradient here, before the step changes it."""
        absent = self.step.submissions.absent
        for segment in self.bucket.segments:
            if segment.parameter in absent:
                self.kept[segment] = [held.copy() for held in self._state.held(segment)]

    def begin(self) -> None:
        """Begin to compress this bucket. Other threads or a device may do this while another bucket is exchanged."""
        self._prepare()
        self._packing = self.plan.vector.begin_packing(self.step)
        if self.plan.encoder.ks:
            self._begun = self.plan.encoder.begin(self._kernels, self._work(), self._state)

    def settle(self) -> None:
        """Wait for the work that :meth:`begin` has begun, if nothing else has waited for it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def run(self) -> None:
        """Exchange the bucket, whose gradients have all arrived, and add up what the ranks have sent."""
        stats, since = self.step.stats, time.perf_counter()
        nonfinite = self._select()
        since = stats.lap("compress", since)
        options, absent = self.step.options, _digest(self.kept) if self.kept else 0
        joined = options.joins | Flags.EDITED * options.edited
        messages = self.plan.exchange(self._state, nonfinite=nonfinite, joined=joined, absent=absent)
        since = stats.lap("exchange", since)
        self._add_up(messages)
        stats.lap("apply", since)
        self._count()

    def send_error(self, error: DGCError, parameter: int | None) -> None:
        """Send a message of normal size that carries an error instead of entries."""
        self._prepare()
        self.plan.send_error(error, parameter)

    def _prepare(self) -> None:
        """Prepare the plan. Move what other plans hold in the state, and this one does not, into residuals."""
        if self._prepared is not self.plan:
            if self._prepared is not None:
                self._prepared.release()
            self._prepared = self.plan
        self.plan.prepare(self._transport, self._kernels)
        if self.step.density is not None:
            holds = self.plan.holds
            self._state.return_owned(sparse="w" not in holds, small="owned_error" not in holds)

    def _select(self) -> bool:
        """Select entries, and write all that this rank sends; return whether a value is not finite."""
        if self._packing is None:
            self.begin()
        plan, nonfinite, begun, packing = self.plan, False, self._begun, self._packing
        self._begun = None
        if begun is not None:
            payload = plan.messages.payload if plan.encodes else None
            nonfinite = plan.encoder.select(self.step, self._state, payload, begun)
        nonfinite |= packing is not None and packing()
        return nonfinite | (not plan.write(self._state))

    def _add_up(self, messages: Sequence[Incoming]) -> None:
        """Add up what the ranks have sent."""
        plan = self.plan
        self.absent = [message.absent for message in messages]
        self.flagged_by = [message.sender for message in messages if message.nonfinite]
        self.step.joined.update({message.sender: message.joined for message in messages if message.joined})
        self.step.edited.update(message.sender for message in messages if message.edited)
        self.flagged = bool(self.flagged_by) | (not plan.add_up_dense(messages, self._factor))
        if plan.encoder.ks and not self.flagged:
            self.flagged = not plan.add_up(messages, self._factor * self.step.loss_scale)

    def _work(self) -> list[SegmentWork]:
        """Return the kernels' work on each sparsified tensor of the bucket."""
        step, hyper, work = self.step, self.step.hyper, []
        for segment, k in zip(self.bucket.sparse, self.plan.encoder.ks, strict=True):
            i = segment.parameter
            item, decay = step.submissions[i], hyper.weight_decay[i] * self._states.own_share
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

    def _count(self) -> None:
        plan, stats = self.plan, self.step.stats
        stats.dense_bytes += self._elements * plan.vector.itemsize
        stats.sparse_elements += self._sparse_elements
        stats.entries_sent += self._sparse_elements if self.step.density is None else plan.count
        stats.small_bytes += plan.small_bytes

    # -- on the caller's thread ----------------------------------------------------------------------------------------

    def write_results(self) -> None:
        """Write the results of sparsified tensors, unless the bucket is flagged."""
        if self.plan.encoder.ks and not self.flagged:
            self.plan.write_results(self.step.submissions.results(self.bucket.sparse))

    def overflows(self) -> bool:
        """Return whether a result is too large for the narrower type that it is cast to; the same on every rank."""
        self.flagged = self.plan.vector.overflows(self.step, self._state.u)
        return self.flagged

    def finish(self, *, refused: bool, left_alone: Collection[int] = ()) -> None:
        """Write the results of dense tensors, and drop the gradients. Unless refused, take what was sent from v.

        If no rank has a gradient of a parameter (``left_alone``), its state is restored and its result is 0. In a
        refused step the flagged buckets' results become NaN, so that a GradScaler skips the step.
        """
        plan, state, submissions = self.plan, self._state, self.step.submissions
        self.kept = {s: kept for s, kept in self.kept.items() if s.parameter in left_alone} if self.kept else {}
        if not refused:
            plan.commit(state)
        if plan.encoder.ks:
            plan.encoder.finish(state, refused=refused)
            if not refused:
                self._take_out()
            if not plan.encoder.keeps_residual:
                self._memory.fill(state.v, 0)
        if refused and self.flagged:
            for result in submissions.results(self.bucket.segments):
                self._memory.fill(result, np.nan)
        else:
            plan.vector.write(self.step, state.u, refused=refused)
            for result in submissions.results(list(self.kept)):
                self._memory.fill(result, 0)
        for segment, kept in self.kept.items():
            for held, values in zip(state.held(segment), kept, strict=True):
                held[...] = values
            state.residual_pending |= bool(state.error_of(segment).any())
        for segment in self.bucket.segments:
            del submissions[segment.parameter]  # and with it the gradient's memory
        plan.vector.release()

    def _take_out(self) -> None:
        """Subtract what was sent from v, and mask momentum."""
        plan, state = self.plan, self._state
        masking = plan.encoder.masks()
        if not (plan.encoder.keeps_residual or masking):
            return
        own = plan.sent()
        if isinstance(own, SparseValues):
            self._kernels.take_out(state.u, state.v, own.positions, own.values, masking=masking)
            return
        for segment, values in zip(self.bucket.sparse, own.values, strict=True):
            state.v[segment.slice] -= values

    def met(self, own: int, names: Sequence[str], kind: str = "gradient") -> str:
        """Return which rank met a value that is not finite. On that rank, also name the parameter.

        The value was in the parameter's gradient, or in its ``kind``.
        """
        label = self._transport.label
        if own in self.flagged_by or not self.flagged_by:
            gradients = {s.parameter: self.step.submissions[s.parameter].gradient for s in self.bucket.segments}
            worst = max(gradients, key=lambda parameter: _worst(gradients[parameter]))
            return f"{label(own)} in the {kind} of {names[worst]!r}"
        return f"{label(self.flagged_by[0])}, whose own message names the parameter"

    def refusal(self, own: int, names: Sequence[str]) -> str:
        """Return the warning for the user of rank ``own`` about a step that is refused because of this bucket."""
        return (
            f"NaN, infinity or an overflow in step {self.step.number}, met by {self.met(own, names)}: the step is "
            "refused, and that bucket's results are NaN on all ranks, which optimizer.step() writes into the "
            "parameters, as in training without compression. Look for the cause (learning rate, data, float16), give "
            "the compressor a GradScaler (loss_scale=scaler), or do not call step() when a gradient is NaN"
        )


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
