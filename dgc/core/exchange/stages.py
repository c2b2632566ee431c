"""The stages of a step, and the object through which two threads share its stage and its error."""

from __future__ import annotations

import enum
import os
import threading

from dgc.core.exchange.step import Step
from dgc.errors import DGCError, RemoteError, TransportError, unraised

# A forked child counts one more than its parent. Calling getpid() before every gradient would take longer.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Stage(enum.Enum):
    """The stage of a step."""

    NONE = "no step so far, or none since the state was reset or loaded"
    OPEN = "gradients come in, and buckets run"
    THROUGH = "all buckets have run; finish() was not called"
    BROKEN = "an error ended the exchange; finish() or fail() has not raised it"
    COMMITTED = "the results are there, and what was sent has left the residual"
    REFUSED = "a value was not finite: the gradient stays in the residual"
    FAILED = "an error was raised; reset() or load_state_dict() must come first"


class Event(enum.Enum):
    """What happens to a step."""

    BEGIN = "first gradient of a step"
    RUN = "last bucket has run"
    BREAK = "a message carries an error, is damaged, or a collective fails; or the step is given up"
    COMMIT = "`finish()`: all values are finite"
    REFUSE = "`finish()`: a value is not finite"
    RAISE = "`finish()` or `fail()` raises the error"
    RESET = "`reset()`, `load_state_dict()`"


_UNDER_WAY = (Stage.OPEN, Stage.THROUGH, Stage.BROKEN)
_BETWEEN = (Stage.NONE, Stage.COMMITTED, Stage.REFUSED)

# (stage, event) -> the next stage. A pair that is missing is an error of this package.
TABLE: dict[tuple[Stage, Event], Stage] = {
    **{(stage, Event.BEGIN): Stage.OPEN for stage in _BETWEEN},
    (Stage.OPEN, Event.RUN): Stage.THROUGH,
    (Stage.OPEN, Event.BREAK): Stage.BROKEN,
    (Stage.THROUGH, Event.BREAK): Stage.BROKEN,
    (Stage.BROKEN, Event.BREAK): Stage.BROKEN,  # the first error counts
    (Stage.THROUGH, Event.COMMIT): Stage.COMMITTED,
    (Stage.THROUGH, Event.REFUSE): Stage.REFUSED,
    (Stage.BROKEN, Event.RAISE): Stage.FAILED,
    **{(stage, Event.RESET): Stage.NONE for stage in (*_BETWEEN, Stage.FAILED)},
}


def as_dgc_error(error: BaseException) -> DGCError:
    """Return the error itself if it is one of this package, else a :class:`RemoteError` whose cause it is."""
    if isinstance(error, DGCError):
        return error
    wrapped = RemoteError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class LatestStep:
    """The latest step of one exchange, shared by the caller's thread and the communication thread.

    Attributes:
        lock: guards all attributes, and is notified of every change.
        stage: the stage of the step.
        step: the step, while it is under way.
        error: the error that ended the step, in the stages BROKEN and FAILED.
        announced: an error of this rank, to be sent in its next message, and the parameter that the error concerns.
        closed: whether the exchange was closed.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.stage = Stage.NONE
        self.step: Step | None = None
        self.error: DGCError | None = None
        self.announced: tuple[DGCError, int | None] | None = None
        self.closed = False
        self._process = _forks

    @property
    def in_child(self) -> bool:
        """Whether this process is a fork of the one that exchanges. Then it has no thread, and the lock may be held."""
        return self._process != _forks

    @property
    def under_way(self) -> bool:
        """Whether the step has begun and not ended."""
        return self.stage in _UNDER_WAY

    @property
    def failure_pending(self) -> bool:
        """Whether an error came too late for its step; the first message of the next step carries it."""
        return self.announced is not None and not self.under_way and self.stage is not Stage.FAILED

    def require_usable(self) -> None:
        """Refuse to begin or continue a step if that is impossible."""
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

    def wait_until_raised(self, timeout: float) -> bool:
        """Wait until the error of a broken step was raised; return False after ``timeout`` seconds."""
        with self.lock:
            return self.lock.wait_for(lambda: self.stage is not Stage.BROKEN or self.closed, timeout)

    def enter(self, event: Event) -> None:
        """Go to the next stage of :data:`TABLE`."""
        with self.lock:
            following = TABLE.get((self.stage, event))
            if following is None:
                raise RuntimeError(f"{event.name} came in the stage {self.stage.name}")
            self.stage = following
            if following not in _UNDER_WAY:
                self.step = None
            self.lock.notify_all()

    def begin(self, step: Step) -> None:
        """Open a step. The caller holds the lock."""
        self.enter(Event.BEGIN)
        self.step = step

    def announce(self, error: BaseException, parameter: int | None = None) -> None:
        """Let the next message carry an error of this rank, unless there was an earlier one."""
        with self.lock:
            self.announced = self.announced or (unraised(as_dgc_error(error)), parameter)
            self.lock.notify_all()

    def break_off(self, error: DGCError) -> None:
        """End the exchange because of an error. If there are several, the first one is kept."""
        with self.lock:
            self.error = self.error or error
            self.enter(Event.BREAK)

    def fail(self, error: DGCError) -> DGCError:
        """End the step because of an error; return a copy of the first error, which the caller must raise."""
        self.break_off(unraised(error))
        self.enter(Event.RAISE)
        assert self.error is not None, "it was broken off"
        return unraised(self.error).with_traceback(self.error.__traceback__)

    def recover(self) -> None:
        """Forget the step and its error: the state was reset or loaded."""
        with self.lock:
            self.error = self.announced = None
            self.enter(Event.RESET)

    def close(self) -> None:
        """Let no step begin or continue."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
