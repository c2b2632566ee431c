"""What comes before a bucket's run: its gradients are there, it is clipped, and threads to spare have begun with it.

Where the kernels have several threads, those but one would have nothing to do while the communication thread encodes a
bucket, waits for the network and applies what came. So the bucket after it is begun first, if its gradients are in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dgc.core.exchange.bucket import BucketStep
from dgc.core.exchange.clipping import Clipping
from dgc.core.exchange.records import StepContext, StepStats, Submission
from dgc.core.kernels.base import Kernels
from dgc.core.state.state import State


class Preparation:
    """Prepares the buckets of a step in their order, each once. Used by the communication thread alone."""

    def __init__(self, steps: Sequence[BucketStep], state: State, clipping: Clipping, kernels: Kernels) -> None:
        """Take what an exchange works with.

        Args:
            steps: one for each bucket.
            state: of all buckets, in the same order.
            clipping: fills in each bucket's factors.
            kernels: their ``overlaps`` says whether there are threads to spare.
        """
        self._steps = steps
        self._state = state
        self._clipping = clipping
        self._kernels = kernels
        self._ready = 0

    @property
    def needs_all_gradients(self) -> bool:
        """Whether no bucket can be prepared before all gradients are there."""
        return self._clipping.needs_all_gradients

    def start(self) -> None:
        """Begin a new step."""
        self._ready = 0
        for step in self._steps:
            step.sent = False

    def make_ready(
        self, index: int, context: StepContext, given: Sequence[Submission | None], stats: StepStats
    ) -> None:
        """Prepare a bucket, unless that has been done.

        Args:
            index: of the bucket; those before it are prepared.
            context: the step; its clipping factors are filled in.
            given: by parameter index; those of the bucket are not None.
            stats: the step's counters, added to.
        """
        if index < self._ready:
            return
        step = self._steps[index]
        for each in self._steps if self.needs_all_gradients else [step]:
            each.await_gradients(given)
        with stats.timed("compress"):
            self._clipping.fill_in(context, step.bucket, given)
            if self._kernels.overlaps and step.begins_early:
                step.begin(context, self._state.buckets[index], given)
        self._ready = index + 1

    def try_following(
        self, index: int, context: StepContext, given: Sequence[Submission | None], stats: StepStats
    ) -> None:
        """Prepare the bucket after ``index``, if that is any use and its gradients are there."""
        following = index + 1
        if not self._kernels.overlaps or following == len(self._steps):
            return
        if any(given[segment.parameter] is None for segment in self._steps[following].bucket.segments):
            return
        # What fails here fails again when it is that bucket's turn, and can be told the other ranks then.
        with contextlib.suppress(Exception):
            self.make_ready(following, context, given, stats)

    def abandon(self) -> None:
        """Let nobody work on a bucket any more that was begun and did not run."""
        for step in self._steps:
            step.abandon()
