"""What an encoder is: it turns a bucket's gradients, u and v into the payload of a message, and messages into results.

Everything around it is :class:`~dgc.core.exchange.bucket.BucketExchange`'s: headers, collectives of messages, dense
tensors, counters and errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc.core.compressors import compressor_class
from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders.dense_vector import DenseVector
from dgc.core.exchange.records import EntrySum, StepContext
from dgc.core.kernels.base import Array, Kernels, SegmentWork
from dgc.core.layout import Bucket, Segment
from dgc.core.message import Incoming, Sender
from dgc.core.plan import BucketPlan
from dgc.core.state import BucketState


@dataclass(slots=True)
class BucketStep:
    """One bucket in one step, from its gradients to the commit.

    Attributes:
        step: all gradients of the bucket are in.
        plan: how the bucket is sent; once compressed, with the sizes that this step's messages have on all ranks.
        state: u and v, which take in the gradients and nothing else before the commit, and thresholds; in place.
        sender: the message, whose payload an encoder writes.
        vector: what is summed densely; in a dense sum of entries an encoder writes its sparsified part.
        count: entries that this rank has put into its message.
        sent: positions and values of a selection as the receivers read them, (k,) each, until that is committed.
        flagged: whether a value is not finite; once the messages are in, on any rank.
        flagged_by: the ranks that met such a value before they sent anything.
        is_out: whether this rank's message is out; an error can no longer be reported in it.
        is_committed: whether what was sent has left the residual.
        deferred: the results of the sparsified tensors that have not been written.
        absent: each rank's digest of the parameters of which it has no gradient, once the messages are in.
        kept: by segment, what the state held of those that are absent on this rank, before the step.
    """

    step: StepContext
    plan: BucketPlan
    state: BucketState
    sender: Sender
    vector: DenseVector
    count: int = 0
    sent: tuple[Array, Array] | None = None
    flagged: bool = False
    flagged_by: tuple[int, ...] = ()
    is_out: bool = False
    is_committed: bool = False
    deferred: EntrySum | None = None
    absent: tuple[int, ...] = ()
    kept: dict[Segment, list[Array]] = field(default_factory=dict)

    def start_message(self) -> None:
        """Begin a message of the plan's sizes; in each step before anything of it or of the vector is written."""
        self.vector.start(self.plan)
        self.sender.start(self.plan, self.step.step, self.step.fingerprint)


class Encoder(ABC):
    """One bucket's way into a message and out of it. Used by the communication thread alone.

    Attributes:
        begins_early: whether :meth:`begin` does anything.
    """

    begins_early = False

    def __init__(
        self, bucket: Bucket, config: DGCConfig, kernels: Kernels, ranks: int, *, keeps_residual: bool
    ) -> None:
        """Allocate nothing yet.

        Args:
            bucket: the bucket.
            config: of its compressor.
            kernels: of the host or of a device.
            ranks: P.
            keeps_residual: whether what is not sent stays in v.
        """
        self._bucket = bucket
        self._config = config
        self._kernels = kernels
        self._memory = kernels.memory
        self._ranks = ranks
        self._keeps_residual = keeps_residual
        self._elements = sum(s.length for s in bucket.sparse)
        self._plans: dict[float | None, BucketPlan] = {}

    # -- sizes: the same on every rank -----------------------------------------------------------------------------

    def plan_at(self, density: float | None) -> BucketPlan:
        """How the bucket is sent at a density; None for a dense step.

        Raises:
            LayoutError: a message would be too large.
        """
        if density not in self._plans:
            self._plans[density] = self._make_plan(density)
        return self._plans[density]

    @abstractmethod
    def _make_plan(self, density: float | None) -> BucketPlan: ...

    # -- a step ----------------------------------------------------------------------------------------------------

    def await_gradients(self, step: StepContext) -> None:
        """Let what comes next wait for the gradients of this bucket, where they are computed asynchronously."""
        for event in step.submissions.events(self._bucket.index):
            self._kernels.wait_for(event.handle)

    def begin(self, at: BucketStep) -> None:
        """Let others (threads, a device) begin to compress while this thread has another bucket to do."""
        return

    def abandon(self) -> None:
        """Stop work on the bucket, when :meth:`compress` will not come to what :meth:`begin` began."""
        return

    @abstractmethod
    def compress(self, at: BucketStep) -> None:
        """Accumulate, select and encode: start the message, write its payload and nothing else of it."""

    def catch_up(self, at: BucketStep) -> None:
        """Make the collectives that the other ranks made before their message, where :meth:`compress` did not."""
        return

    @abstractmethod
    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:
        """Write the results of the sparsified tensors: the messages' sum in rank order, times ``share``.

        Args:
            at: its plan's mode is SPARSE. Where the step ``defers``, entries may become ``at.deferred`` instead of
                being written; ``at`` is flagged where a message holds NaN or infinity, or the sum overflows.
            messages: of all ranks.
            share: 1 / P, or 1 for a sum.

        Raises:
            WireError: a message is damaged; names its sender.
        """

    def finish(self, at: BucketStep, *, refused: bool) -> None:
        """End the exchange of a step, whatever becomes of it: a compressor without a residual empties v."""
        if not self._keeps_residual and at.plan.is_active:
            self._memory.fill(at.state.v, 0)

    @abstractmethod
    def commit(self, at: BucketStep, state: BucketState) -> Array | None:
        """Subtract what was sent from v and mask momentum; the step counts. Nothing else changes u and v for good.

        Args:
            at: a finished step.
            state: as :meth:`compress` left it, or a copy of it.

        Returns:
            (k,) positions of what was sent, where the kernels work or on the host; None for all elements or none.
        """

    # -- shared by encoders ----------------------------------------------------------------------------------------

    def _work(self, at: BucketStep) -> list[SegmentWork]:
        """What the kernels do with each sparsified tensor of the bucket in this step."""
        step, hyper = at.step, at.step.hyper
        share = self._config.own_share(self._ranks)
        work = []
        for segment, k in zip(self._bucket.sparse, at.plan.ks, strict=True):
            i = segment.parameter
            item = step.submissions[i]
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
                    scale=step.scales[i],
                )
            )
        return work

    def _put(self, at: BucketStep, entries: Sequence[tuple[Any, Any]], factor: float) -> None:
        """Add up the entries that came, and write or defer their sum."""
        total = EntrySum.of(self._bucket, entries, factor)
        at.flagged = not np.isfinite(total.values).all()
        if at.step.defers and not at.flagged and not (at.absent and all(at.absent)):
            at.deferred = total
        else:
            total.write(at.step, self._kernels)

    def _masks(self, sent: int) -> bool:
        """Whether momentum is cleared where so many entries were sent.

        That forgets stale momentum. Where all entries are sent none is stale: sparsity 0 is dense training.
        """
        return self._config.momentum_masking and sent < self._elements

    def _is_exact(self, density: float | None) -> bool:
        """Whether nothing is coded: in a dense step, and where sparsity is 0, which is one."""
        return density is None or compressor_class(self._config.algorithm).sends_all(density)

    def _small(self, density: float | None) -> str:
        """The value codec of small tensors."""
        return "float32" if self._is_exact(density) else self._config.small
