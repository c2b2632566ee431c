"""The training step of an exchange: its stages and its error.

A step changes u and v in two parts. Gradients are accumulated while it runs; what was sent is subtracted by
:meth:`Step.applied`, once the step counts. A refused, failed or dropped step therefore has nothing to put back.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Sequence

from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.records import StepContext
from dgc.core.state import State
from dgc.errors import DGCError, RemoteError, TransportError

_forks = 0
"""How often this process was forked; reading its number before every gradient would cost more."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Stage(enum.Enum):
    """Where a step stands."""

    NONE = "no step so far, or none since the state was reset or loaded"
    OPEN = "gradients come in, and buckets run"
    THROUGH = "all buckets have run; finish() was not called"
    BROKEN = "an error ended the exchange; finish() or fail() has not raised it"
    EXCHANGED = "the results are there; the update has neither used nor dropped them"
    APPLIED = "it counts: what was sent has left the residual"
    DROPPED = "exchanged and not applied"
    REFUSED = "a value was not finite"
    FAILED = "an error was raised; reset() or load_state_dict() must come first"


class Event(enum.Enum):
    """What happens to a step."""

    BEGIN = "first gradient of a step"
    RUN = "last bucket has run"
    BREAK = "a message carries an error, is damaged, or a collective fails; or the step is given up"
    FINISH = "`finish()`: all values are finite"
    REFUSE = "`finish()`: a value is not finite"
    RAISE = "`finish()` or `fail()` raises the error"
    APPLY = "`applied()`: the optimizer updates the parameters, or updates are not reported"
    DROP = "`drop()`: the results are not used"
    RESET = "`reset()`, `load_state_dict()`"


_UNDER_WAY = (Stage.OPEN, Stage.THROUGH, Stage.BROKEN)
_BETWEEN = (Stage.NONE, Stage.EXCHANGED, Stage.APPLIED, Stage.DROPPED, Stage.REFUSED)

TABLE: dict[tuple[Stage, Event], Stage] = {
    **{(stage, Event.BEGIN): Stage.OPEN for stage in _BETWEEN},
    (Stage.OPEN, Event.RUN): Stage.THROUGH,
    (Stage.OPEN, Event.BREAK): Stage.BROKEN,
    (Stage.THROUGH, Event.BREAK): Stage.BROKEN,
    (Stage.THROUGH, Event.FINISH): Stage.EXCHANGED,
    (Stage.THROUGH, Event.REFUSE): Stage.REFUSED,
    (Stage.BROKEN, Event.RAISE): Stage.FAILED,
    (Stage.EXCHANGED, Event.APPLY): Stage.APPLIED,
    (Stage.EXCHANGED, Event.DROP): Stage.DROPPED,
    **{(stage, Event.RESET): Stage.NONE for stage in (*_BETWEEN, Stage.FAILED)},
}
"""(stage, event) -> the next stage."""

IGNORED = {
    (Stage.BROKEN, Event.BREAK),  # the first error counts
    *((stage, event) for stage in Stage if stage is not Stage.EXCHANGED for event in (Event.APPLY, Event.DROP)),
}
"""Pairs that change nothing; all others that :data:`TABLE` lacks are errors of this package."""


class Step:
    """The latest step of one exchange, shared by the caller's thread and the communication thread.

    Attributes:
        lock: guards all of this; it is notified of every change.
        stage: where the step stands.
        context: what its buckets share while it is under way.
        error: what ended it, in the stages BROKEN and FAILED.
        announced: an error of this rank, and the parameter it concerns, which its next message carries.
        closed: whether the exchange was closed.

    A dropped or failed step keeps its gradient in u and v and counts in the schedule, and dense tensors' momentum keeps
    what it took in. A rank that has joined goes back to a copy of the state instead: its last step was none.
    """

    def __init__(self, state: State, buckets: Sequence[BucketExchange]) -> None:
        """Begin without a step, of an exchange with this state and these buckets."""
        self.lock = threading.Condition()
        self.stage = Stage.NONE
        self.context: StepContext | None = None
        self.error: DGCError | None = None
        self.announced: tuple[DGCError, int | None] | None = None
        self.closed = False
        self._state = state
        self._buckets = buckets
        self._before: State | None = None
        self._process = _forks

    @property
    def in_child(self) -> bool:
        """Whether this is a fork of the process that exchanges: no thread runs here, and the lock may be held."""
        return self._process != _forks

    @property
    def under_way(self) -> bool:
        """Whether the step has begun and not ended."""
        return self.stage in _UNDER_WAY

    @property
    def undecided(self) -> bool:
        """Whether the step was exchanged, and neither applied nor dropped."""
        return self.stage is Stage.EXCHANGED

    @property
    def failure_pending(self) -> bool:
        """Whether an error came too late for its step; the first message of the next one carries it."""
        return self.announced is not None and not self.under_way and self.stage is not Stage.FAILED

    def require_usable(self) -> None:
        """Refuse what would begin or go on with a step.

        Raises:
            TransportError: the exchange was closed, or belongs to the process that this one was forked from.
            RemoteError: an earlier step failed.
        """
        if self._process != _forks:
            raise TransportError(
                "this process was forked from one that exchanges gradients, and cannot exchange any: start the job "
                "with one process for each rank"
            )
        if self.closed:
            raise TransportError("this compressor was closed; build a new one")
        if self.stage is Stage.FAILED:
            raise RemoteError(
                f"an earlier step failed ({self.error}); call reset() or load_state_dict() on all ranks, or restart"
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no bucket runs; returns False when ``timeout`` seconds did not suffice."""
        with self.lock:
            return self.lock.wait_for(lambda: self.stage is not Stage.OPEN, timeout)

    def wait_until_raised(self, timeout: float) -> bool:
        """Wait until the error of a broken step was raised; False if ``timeout`` seconds did not suffice."""
        with self.lock:
            return self.lock.wait_for(lambda: self.stage is not Stage.BROKEN or self.closed, timeout)

    # -- events ----------------------------------------------------------------------------------------------------

    def enter(self, event: Event) -> bool:
        """Go to the next stage of :data:`TABLE`; returns False where the event is ignored."""
        with self.lock:
            following = TABLE.get((self.stage, event))
            if following is None:
                if (self.stage, event) in IGNORED:
                    return False
                raise RuntimeError(f"{event.name} came in the stage {self.stage.name}")
            self.stage = following
            if following not in _UNDER_WAY:
                self.context = None
            self.lock.notify_all()
            return True

    def announce(self, error: DGCError, parameter: int | None = None) -> None:
        """Have the next message carry an error of this rank; the first one counts."""
        with self.lock:
            self.announced = self.announced or (error, parameter)
            self.lock.notify_all()

    def begin(self, context: StepContext) -> None:
        """Open a step; the one before it counts if that is undecided. The caller holds the lock."""
        self.applied()
        self._before = None
        for bucket in self._buckets:
            bucket.start(context)
        self.enter(Event.BEGIN)
        self.context = context

    def broke(self, error: DGCError) -> None:
        """End the exchange by an error, on all ranks or on this one; the first one counts."""
        with self.lock:
            self.error = self.error or error
            self.enter(Event.BREAK)

    def fail(self, error: DGCError) -> DGCError:
        """End the step by an error, and go back to copies from before it; returns the first error, to be raised."""
        self.broke(error)
        self.enter(Event.RAISE)
        self._go_back()
        return self.error or error

    def finish(self, *, refused: bool) -> None:
        """End a step whose buckets have finished."""
        self.enter(Event.REFUSE if refused else Event.FINISH)

    def applied(self) -> None:
        """Let the step count: what was sent leaves the residual."""
        if self.stage is Stage.EXCHANGED:
            for bucket in self._buckets:
                bucket.commit()
            self.enter(Event.APPLY)

    def drop(self) -> bool:
        """Leave the results of the step unused: what was sent stays in the residual.

        Returns:
            False when there is nothing to drop: no step, or one that was refused, applied or dropped.
        """
        if not self.enter(Event.DROP):
            return False
        self._go_back()
        return True

    def recover(self) -> None:
        """Forget the step and its error: the state was reset or loaded."""
        with self.lock:
            self.error = self.announced = self._before = None
            self.enter(Event.RESET)

    def close(self) -> None:
        """Let no step begin or go on."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()

    # -- copies of the state ---------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Copy the state from before the step, on a rank that has joined."""
        if self.context is not None and self.context.joins:
            self._before = self._state.copy()

    def counted(self) -> State:
        """The state with the step applied: a copy of it while that is undecided."""
        if self.stage is not Stage.EXCHANGED:
            return self._state
        counted = self._state.copy()
        for bucket, copy in zip(self._buckets, counted.buckets, strict=True):
            bucket.commit(copy)
        return counted

    def _go_back(self) -> None:
        if self._before is not None:
            self._state.assign(self._before)
            self._before = None
