"""Where an exchange stands: the states of a step, from its first gradient to its end, whatever that is.

``docs/architecture.md`` has the table of states and events.
"""

from __future__ import annotations

import enum
import os
import threading

from dgc.errors import DGCError, RemoteError, TransportError

_forks = 0
"""How often this process was forked from another one; to ask for its number before every gradient would cost more."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Phase(enum.Enum):
    """States of a step. ``docs/architecture.md`` says which event leads where."""

    IDLE = "between steps"
    RUNNING = "gradients come in, and buckets run"
    THROUGH = "all buckets are through; finish() has not been called"
    BROKEN = "an error ended the step; what was sent in it has not been put back"
    FAILED = "a step failed; reset() or load_state_dict() must come first"


class StepStatus:
    """The state of one exchange, shared by the caller's thread and the communication thread.

    Attributes:
        lock: guards all of this; it is notified of every change.
        phase: the state.
        error: what ended the step, while the phase is BROKEN or FAILED.
        announced: an error of this rank, and the parameter it concerns, for its next message to tell the other ranks.
        closed: whether the exchange was closed.
    """

    def __init__(self) -> None:
        """Begin between steps."""
        self.lock = threading.Condition()
        self.phase = Phase.IDLE
        self.error: DGCError | None = None
        self.announced: tuple[DGCError, int | None] | None = None
        self.closed = False
        self._forks = _forks

    @property
    def in_child(self) -> bool:
        """Whether this is a fork of the process that exchanges: no thread runs here, and the lock may be held."""
        return self._forks != _forks

    @property
    def in_step(self) -> bool:
        """Whether a step has begun that has not ended."""
        return self.phase in (Phase.RUNNING, Phase.THROUGH, Phase.BROKEN)

    @property
    def owes_failure(self) -> bool:
        """Whether an error came too late for its step; the first message of the next one tells the other ranks."""
        return self.phase is Phase.IDLE and self.announced is not None

    def require_usable(self) -> None:
        """Refuse what would begin or go on with a step.

        Raises:
            TransportError: the exchange was closed, or belongs to the process that this one was forked from.
            RemoteError: an earlier step failed.
        """
        if self.in_child:
            raise TransportError(
                "this process was forked from one that exchanges gradients, and cannot exchange any: start the job "
                "with one process for each rank"
            )
        if self.closed:
            raise TransportError("this compressor was closed; build a new one")
        if self.phase is Phase.FAILED:
            raise RemoteError(
                f"an earlier step failed ({self.error}); call reset() or load_state_dict() on all ranks, or restart"
            )

    def wait_while_running(self, timeout: float | None = None) -> bool:
        """Wait until no bucket runs any more; returns False when ``timeout`` seconds did not suffice."""
        with self.lock:
            return self.lock.wait_for(lambda: self.phase is not Phase.RUNNING, timeout)

    def wait_until_taken(self, timeout: float) -> bool:
        """Wait until the caller has taken the error of a broken step; False if ``timeout`` seconds did not suffice."""
        with self.lock:
            return self.lock.wait_for(lambda: self.phase is not Phase.BROKEN or self.closed, timeout)

    # -- events --------------------------------------------------------------------------------------------------

    def announce(self, error: DGCError, parameter: int | None = None) -> None:
        """This rank met an error; the first one counts."""
        with self.lock:
            self.announced = self.announced or (error, parameter)
            self.lock.notify_all()

    def begin(self) -> None:
        """The first gradient of a step."""
        self._enter(Phase.RUNNING)

    def through(self) -> None:
        """The last bucket has run."""
        self._enter(Phase.THROUGH)

    def broke(self, error: DGCError) -> None:
        """An error ended the step, on all ranks or on this one; the first one counts."""
        with self.lock:
            self.error = self.error or error
            self._enter(Phase.BROKEN)

    def end(self) -> None:
        """The step is over: it counted, was refused, or was put back after an error."""
        self._enter(Phase.IDLE if self.error is None else Phase.FAILED)

    def recover(self) -> None:
        """The state was reset or loaded."""
        with self.lock:
            self.error = self.announced = None
            self._enter(Phase.IDLE)

    def close(self) -> None:
        """No step may begin or go on."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()

    def _enter(self, phase: Phase) -> None:
        with self.lock:
            self.phase = phase
            self.lock.notify_all()
