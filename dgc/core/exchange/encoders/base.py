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

from dgc.core.compressors.registry import compressor_class
from dgc.core.config.config import DGCConfig
from dgc.core.exchange.encoders.dense_vector import DenseVector
from dgc.core.exchange.records import EntrySum, Outcome, StepContext
from dgc.core.kernels.base import Array, Kernels, SegmentWork
from dgc.core.state.layout import Bucket
from dgc.core.state.state import BucketState
from dgc.core.wire.message import Incoming, Sender
from dgc.core.wire.plan import BucketPlan, Mode


class Buffers:
    """The message of a bucket and its dense vector, in buffers that are kept from step to step."""

    def __init__(self, sender: Sender, vector: DenseVector) -> None:
        """Allocate nothing yet."""
        self.sender = sender
        self.vector = vector
        self._plan: BucketPlan | None = None

    def start(self, step: StepContext, plan: BucketPlan) -> None:
        """Begin a message of the plan's sizes; in each step before anything is written."""
        if self._plan is not plan:
            self.vector.wait_for_buffers()
            self._plan = plan
        self.sender.start(plan, step.fingerprint)
        self.vector.start(plan)

    @property
    def payload(self) -> np.ndarray:
        """(plan.payload_bytes,) uint8, of any content."""
        return self.sender.payload


@dataclass(slots=True)
class BucketStep:
    """One bucket in one step, from its gradients to the commit.

    Attributes:
        step: all gradients of the bucket are in.
        plan: how the bucket is sent; once compressed, with the sizes that this step's messages have on all ranks.
        state: u and v, which take in the gradients and nothing else before the commit, and thresholds; in place.
        buffers: where the payload goes; for a dense sum of entries, the vector.
        outcome: gets the count, whether a value is not finite, and what was sent.
    """

    step: StepContext
    plan: BucketPlan
    state: BucketState
    buffers: Buffers
    outcome: Outcome = field(default_factory=Outcome)


class Encoder(ABC):
    """One bucket's way into a message and out of it. Used by the communication thread alone.

    Attributes:
        begins_early: whether :meth:`begin` does anything.
    """

    begins_early = False

    # -- sizes: the same on every rank -----------------------------------------------------------------------------

    @abstractmethod
    def plan(self, step: StepContext) -> BucketPlan:
        """How the bucket travels in this step; asked once per step."""

    @abstractmethod
    def plan_at(self, density: float | None) -> BucketPlan:
        """How the bucket travels at a density; None for a dense step.

        Raises:
            LayoutError: a message would be too large.
        """

    def check_sizes(self, sparsities: Sequence[float]) -> None:
        """Make the plans of a whole schedule.

        Raises:
            LayoutError: a message would be too large.
        """
        for sparsity in sparsities:
            self.plan_at(1.0 - sparsity)

    # -- a step ----------------------------------------------------------------------------------------------------

    def await_gradients(self, step: StepContext) -> None:
        """Let what comes next wait for the gradients of this bucket, where they are computed asynchronously."""
        return

    def begin(self, at: BucketStep) -> None:
        """Let others (threads, a device) begin to compress while this thread has another bucket to do."""
        return

    def abandon(self) -> None:
        """Let nobody work on the bucket any more, when :meth:`compress` will not come to what :meth:`begin` began."""
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
            at: its plan's mode is SPARSE. Where the step ``defers``, entries may become ``outcome.deferred`` instead of
                being written; the outcome is flagged where a message holds NaN or infinity, or the sum overflows.
            messages: of all ranks.
            share: 1 / P, or 1 for a sum.

        Raises:
            WireError: a message is damaged; names its sender.
        """

    def finish(self, at: BucketStep, *, refused: bool) -> None:
        """End the exchange of a step, whatever becomes of it: a compressor without a residual empties v."""
        return

    @abstractmethod
    def commit(self, at: BucketStep, state: BucketState) -> Array | None:
        """Subtract what was sent from v and mask momentum; the step counts. Nothing else changes u and v for good.

        Args:
            at: a finished step.
            state: as :meth:`compress` left it, or a copy of it.

        Returns:
            (k,) positions of what was sent, where the kernels work or on the host; None for all elements or none.
        """

    @abstractmethod
    def why_empty(self, at: BucketStep) -> str | None:
        """Say why nothing stays in the residual after the step; None where something does."""


def largest(values: np.ndarray) -> float:
    """The largest magnitude, NaN if there is one; two reads without a temporary array."""
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def put_entries(
    at: BucketStep, bucket: Bucket, entries: Sequence[tuple[Any, Any]], factor: float, kernels: Kernels
) -> None:
    """The last part of :meth:`Encoder.apply` where messages hold entries and the results are on the host."""
    total = EntrySum.of(bucket, entries, factor)
    at.outcome.flagged = not total.is_finite
    if at.step.defers and not at.outcome.flagged:
        at.outcome.deferred = total
    else:
        total.write(at.step, kernels)


def why_empty(active: bool, keeps_residual: bool, name: str) -> str | None:
    """:meth:`Encoder.why_empty` of an encoder by whether it was active, and keeps a residual."""
    if not active:
        return "the step was dense: everything was sent"
    return None if keeps_residual else f"{name} keeps no residual here: what a step does not send is not sent later"


def is_active(plan: BucketPlan, tensors: Sequence[Any]) -> bool:
    """Whether an encoder has anything to do: a sparsified step, and a tensor that is."""
    return plan.mode is not Mode.DENSE and bool(tensors)


def masks(config: DGCConfig, sent: int, elements: int) -> bool:
    """Whether momentum is cleared where entries were sent.

    That forgets stale momentum. Where all entries are sent none is stale: sparsity 0 is dense training.

    Args:
        config: the options.
        sent: entries that this rank sends.
        elements: those that they are chosen from.
    """
    return config.momentum_masking and sent < elements


def small_codec(config: DGCConfig, density: float | None) -> str:
    """Which value codec small tensors travel with: none in a dense step, or where sparsity is 0, which is one."""
    exact = density is None or (density == 1.0 and compressor_class(config.algorithm).scheduled)
    return "float32" if exact else config.small


def segment_work(bucket: Bucket, config: DGCConfig, at: BucketStep, ranks: int) -> list[SegmentWork]:
    """What the kernels do with each sparsified tensor of the bucket in this step."""
    step, hyper = at.step, at.step.hyper
    share = config.own_share(ranks)
    work = []
    for segment, k in zip(bucket.sparse, at.plan.ks, strict=True):
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
                scale=step.gradient_scale(i),
            )
        )
    return work
