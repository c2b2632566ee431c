"""One bucket in one step where the compressor follows from the tensor or from the step: hands on to the one in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.bucket_step import BucketStep
from dgc.core.errors import DGCError
from dgc.core.layout import Bucket
from dgc.core.plan import BucketPlan
from dgc.core.schedule import Schedule
from dgc.core.state import BucketState
from dgc.core.stats import StepStats
from dgc.core.step import Outcome, StepContext, Submission


@dataclass
class Part:
    """A compressor's step of a bucket, from which step on it is in turn, and its schedule."""

    first: int
    step: BucketStep
    schedule: Schedule


class PartStep(BucketStep):
    """Hands each call on to the part in turn, with the density of that part's own schedule.

    Residual and momentum are the bucket's, so what one part has not sent the next one sends.
    """

    begins_early = False

    def __init__(self, bucket: Bucket, parts: Sequence[Part]) -> None:
        """Take the parts, ascending by their first step; allocates nothing of its own."""
        self._bucket = bucket
        self._parts = list(parts)
        self._given_context: StepContext | None = None
        self._own_context: StepContext | None = None

    @property
    def sent(self) -> bool:
        """See :attr:`BucketStep.sent`."""
        return any(part.step.sent for part in self._parts)

    @sent.setter
    def sent(self, value: bool) -> None:
        for part in self._parts:
            part.step.sent = value

    def plan(self, density: float | None) -> BucketPlan:
        """The plan of the first part; those of all parts' densities are made, which finds messages too large."""
        for part in self._parts:
            for sparsity in part.schedule.sparsity:
                part.step.plan(1.0 - sparsity)
        first = self._parts[0]
        return first.step.plan(None if density is None else 1.0 - first.schedule.sparsity[0])

    def send_error(self, context: StepContext, error: DGCError, parameter: int | None, stats: StepStats) -> None:
        """See :meth:`BucketStep.send_error`."""
        self._part(context).step.send_error(self._context(context), error, parameter, stats)

    def await_gradients(self, given: Sequence[Submission | None]) -> None:
        """See :meth:`BucketStep.await_gradients`."""
        self._parts[0].step.await_gradients(given)

    def run(
        self, context: StepContext, state: BucketState, given: Sequence[Submission | None], stats: StepStats
    ) -> Outcome:
        """See :meth:`BucketStep.run`."""
        part = self._part(context)
        if part is not self._parts[0] and context.step == part.first:
            # Each compressor remembers something else there.
            state.control[...] = np.nan
        return part.step.run(self._context(context), state, given, stats)

    def take_back(self, state: BucketState, outcome: Outcome) -> None:
        """See :meth:`BucketStep.take_back`; only a selection has kept anything."""
        if outcome.kept is not None:
            self._parts[0].step._kernels.restore(state.u, state.v, outcome.kept)
            outcome.kept = None

    def return_sent(self, context: StepContext, state: BucketState, outcome: Outcome) -> None:
        """See :meth:`BucketStep.return_sent`."""
        self._part(context).step.return_sent(self._context(context), state, outcome)

    def finish(
        self,
        context: StepContext,
        state: BucketState,
        given: Sequence[Submission | None],
        outcome: Outcome,
        refused: bool,
    ) -> None:
        """See :meth:`BucketStep.finish`."""
        self._part(context).step.finish(self._context(context), state, given, outcome, refused)

    def overflows(self, context: StepContext, state: BucketState, given: Sequence[Submission | None]) -> bool:
        """See :meth:`BucketStep.overflows`."""
        return self._part(context).step.overflows(self._context(context), state, given)

    def _part(self, context: StepContext) -> Part:
        return next(p for p in reversed(self._parts) if context.step >= p.first or p is self._parts[0])

    def _context(self, context: StepContext) -> StepContext:
        """The step as the part sees it: the same object throughout a step."""
        if self._given_context is not context or self._own_context is None:
            schedule = self._part(context).schedule
            density = None if context.density is None else schedule.density(context.step)
            self._given_context = context
            self._own_context = dataclasses.replace(context, density=density)
        # Clipping factors are filled in while the step goes on.
        self._own_context.clip = context.clip
        return self._own_context
