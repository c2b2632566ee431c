"""Several encoders for one bucket, one of them in turn, by the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.config.schedule import Schedule
from dgc.core.exchange.encoders.base import Buffers, Encoder
from dgc.core.exchange.records import Outcome, StepContext
from dgc.core.kernels.base import Array
from dgc.core.state.state import BucketState
from dgc.core.wire.message import Incoming
from dgc.core.wire.plan import BucketPlan


@dataclass
class Member:
    """An encoder, the step from which on it is in turn, and its schedule."""

    first: int
    encoder: Encoder
    schedule: Schedule


class CompositeEncoder(Encoder):
    """Hands each call on to the member in turn, with the density of that member's own schedule.

    Residual and momentum are the bucket's, so what one member has not sent the next one sends.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        """Take the members, ascending by their first step; at least one."""
        self.members = list(members)

    def plan(self, step: StepContext) -> BucketPlan:  # noqa: D102
        member = self._in_turn(step)
        return member.encoder.plan_at(None if step.density is None else member.schedule.density(step.step))

    def plan_at(self, density: float | None) -> BucketPlan:
        """That of the first member, at the first density of its schedule."""
        first = self.members[0]
        return first.encoder.plan_at(None if density is None else 1.0 - first.schedule.sparsity[0])

    def check_sizes(self, sparsities: Sequence[float]) -> None:  # noqa: D102
        for member in self.members:
            member.encoder.check_sizes(member.schedule.sparsity)

    def await_gradients(self, step: StepContext) -> None:  # noqa: D102
        self._in_turn(step).encoder.await_gradients(step)

    def compress(  # noqa: D102
        self, step: StepContext, plan: BucketPlan, state: BucketState, buffers: Buffers, outcome: Outcome
    ) -> BucketPlan:
        member = self._in_turn(step)
        if member is not self.members[0] and step.step == member.first:
            # Each compressor remembers something else there.
            state.thresholds[...] = np.nan
        return member.encoder.compress(step, plan, state, buffers, outcome)

    def catch_up(self, step: StepContext, plan: BucketPlan) -> BucketPlan:  # noqa: D102
        return self._in_turn(step).encoder.catch_up(step, plan)

    def apply(  # noqa: D102
        self, step: StepContext, plan: BucketPlan, messages: Sequence[Incoming], share: float, outcome: Outcome
    ) -> None:
        self._in_turn(step).encoder.apply(step, plan, messages, share, outcome)

    def finish(self, step: StepContext, plan: BucketPlan, state: BucketState, *, refused: bool) -> None:  # noqa: D102
        self._in_turn(step).encoder.finish(step, plan, state, refused=refused)

    def commit(  # noqa: D102
        self, step: StepContext, plan: BucketPlan, state: BucketState, outcome: Outcome
    ) -> Array | None:
        return self._in_turn(step).encoder.commit(step, plan, state, outcome)

    def why_empty(self, step: StepContext, plan: BucketPlan) -> str | None:  # noqa: D102
        return self._in_turn(step).encoder.why_empty(step, plan)

    def _in_turn(self, step: StepContext) -> Member:
        return next(m for m in reversed(self.members) if step.step >= m.first or m is self.members[0])
