"""Several encoders for one bucket, one of them in turn, by the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.config.schedule import Schedule
from dgc.core.exchange.encoders.base import BucketStep, Encoder
from dgc.core.exchange.records import StepContext
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

    def compress(self, at: BucketStep) -> None:  # noqa: D102
        member = self._in_turn(at.step)
        if member is not self.members[0] and at.step.step == member.first:
            # Each compressor remembers something else there.
            at.state.thresholds[...] = np.nan
        member.encoder.compress(at)

    def catch_up(self, at: BucketStep) -> None:  # noqa: D102
        self._in_turn(at.step).encoder.catch_up(at)

    def apply(self, at: BucketStep, messages: Sequence[Incoming], share: float) -> None:  # noqa: D102
        self._in_turn(at.step).encoder.apply(at, messages, share)

    def finish(self, at: BucketStep, *, refused: bool) -> None:  # noqa: D102
        self._in_turn(at.step).encoder.finish(at, refused=refused)

    def commit(self, at: BucketStep, state: BucketState) -> Array | None:  # noqa: D102
        return self._in_turn(at.step).encoder.commit(at, state)

    def why_empty(self, at: BucketStep) -> str | None:  # noqa: D102
        return self._in_turn(at.step).encoder.why_empty(at)

    def _in_turn(self, step: StepContext) -> Member:
        return next(m for m in reversed(self.members) if step.step >= m.first or m is self.members[0])
