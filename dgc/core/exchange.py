"""One training step over all buckets: gradients in, averaged results out, while the backward pass goes on.

Buckets run in a fixed order on one communication thread: a bucket is sent when all its gradients are in and all
earlier buckets are through, so that every rank issues the same collectives in the same order whatever order its
gradients arrive in. Only its selection may begin earlier.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dgc.core.clipping import Clipping
from dgc.core.config import DGCConfig
from dgc.core.errors import ConfigError, DGCError, LayoutError, RemoteError, TransportError
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Layout
from dgc.core.preparation import Preparation
from dgc.core.schedule import Schedule
from dgc.core.state import State
from dgc.core.stats import Stats, StepStats
from dgc.core.step import Hyper, Outcome, RemoteFailure, StepContext, Submission
from dgc.core.step_choice import make_steps
from dgc.core.transport import Transport
from dgc.core.unapplied import Unapplied

_CLOSE_PATIENCE = 5.0
"""Seconds that closing waits for a collective under way; a rank that is gone would be waited for for ever."""

LossScale = float | Callable[[], float]


class Exchange:
    """The compressor of one model on one rank: submit every gradient of a step, then :meth:`finish`.

    Attributes:
        state: u, v and the step counter of this rank.
        stats: bytes, densities and seconds.
        hyper: momentum, Nesterov and weight decay by parameter; the adapter may replace it between steps.
        loss_scale: a float or a callable; read once per step.
        unapplied: takes the latest step back if nobody applies it.
    """

    def __init__(
        self,
        layout: Layout,
        config: DGCConfig,
        transport: Transport,
        kernels: Kernels,
        *,
        loss_scale: LossScale = 1.0,
    ) -> None:
        """Allocate the state; the ranks must have agreed on layout and config before.

        Raises:
            LayoutError: a message would be too large at the lowest sparsity of the schedule.
        """
        self.layout = layout
        self.config = config
        self.transport = transport
        self.schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
        self.state = State(layout, kernels)
        self.stats = Stats()
        self.hyper = Hyper.uniform(len(layout.parameters), config)
        self.loss_scale: LossScale = loss_scale
        self._kernels = kernels
        self._steps = make_steps(layout, config, kernels, transport)
        clipping = Clipping(config, kernels, transport.size)
        self._preparation = Preparation(self._steps, self.state, clipping, kernels)
        self.unapplied = Unapplied(self.state, self._steps, kernels, exact=config.discardable)
        for sparsity in config.sparsity:
            for step in self._steps:
                step.plan(1.0 - sparsity)
        self._lock = threading.Condition()
        self._given: list[Submission | None] = [None] * len(layout.parameters)
        self._missing = [len(b.segments) for b in layout.buckets]
        self._outcomes: list[Outcome] = []
        self._context: StepContext | None = None
        self._current = StepStats()
        self._failure: tuple[DGCError, int | None] | None = None
        self._broken: DGCError | None = None
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- one step ------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether gradients of a step have come in that :meth:`finish` has not concluded."""
        return self._context is not None

    @property
    def owes_failure(self) -> bool:
        """Whether a failure came too late for its step; the first message of the next one tells the other ranks."""
        return self._failure is not None and self._broken is None and not self.in_step

    def submit(
        self,
        index: int,
        gradient: np.ndarray,
        result: np.ndarray,
        parameter: np.ndarray | None = None,
        limit: float | None = None,
        ready: Any = None,
    ) -> None:
        """Hand over one parameter's gradient of this step; its bucket starts when it was the last one.

        Args:
            index: the parameter's place in the layout.
            gradient: (numel,) float16, float32 or float64, contiguous; must stay unchanged until :meth:`finish`.
            result: (numel,) float32 (float64 in float64 buckets), contiguous; may be the gradient's memory.
            parameter: (numel,) the parameter's values; needed when its weight decay is not 0.
            limit: largest finite value of the type that the result will be cast to, if narrower than float32.
            ready: for arrays on a device, see :class:`~dgc.core.bucket_step.Submission`.

        Raises:
            LayoutError: wrong length, or the parameter was already submitted in this step. All ranks get it.
        """
        self._check_usable()
        numel = self.layout.parameters[index].numel
        name = self.layout.parameters[index].name
        if gradient.shape != (numel,) or result.shape != (numel,):
            self.fail(
                LayoutError(
                    f"the gradient of {name!r} has {gradient.size} elements, the parameter had {numel} when the "
                    "compressor was built; build a new compressor when parameters change"
                ),
                index,
            )
        self._begin()
        bucket, _ = self.layout.places[index]
        with self._lock:
            twice = self._given[index] is not None
            if not twice:
                self._given[index] = Submission(gradient, result, parameter, limit, ready)
                self._missing[bucket] -= 1
                if self._missing[bucket] == 0:
                    self._lock.notify_all()
        if twice:
            self.fail(
                LayoutError(
                    f"the gradient of {name!r} was given twice in one step; call synchronize() or step() after each "
                    "backward pass, or set backward_passes_per_step"
                ),
                index,
            )

    def fail(self, error: DGCError, parameter: int | None = None) -> None:
        """Tell all ranks that this one cannot go on, and raise the error here once they have been told.

        When all buckets are through, the others finish the step; they are told in the next one, if this rank takes
        part in it.

        Raises:
            DGCError: always; ``error``, or the error of another rank that failed before.
        """
        self._check_usable()
        self._begin()
        with self._lock:
            self._failure = self._failure or (error, parameter)
            self._lock.notify_all()
        self.wait()
        if self._broken is None and len(self._outcomes) == len(self._steps):
            # The step counts here as it does on the others: the next message must be as long as theirs.
            self._finish()
            raise error
        self._broken = self._broken or error
        self._conclude_broken()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all buckets of the step are through; returns False when ``timeout`` seconds did not suffice."""
        with self._current.timed("wait"), self._lock:
            return self._lock.wait_for(lambda: not self._running, timeout)

    def finish(self) -> bool:
        """Wait until all buckets are through and write the results of dense tensors.

        Returns:
            True when the step was refused because a rank met a non-finite value: nothing that was sent counts, the
            flagged results are NaN, and the schedule has not advanced.

        Raises:
            LayoutError: a gradient is missing. All ranks get it.
            DGCError: this rank or another one failed.
        """
        self._check_usable()
        if self.owes_failure:
            # It came too late for its step: the others are in the next one.
            assert self._failure is not None
            self.fail(*self._failure)
        self.require_complete()
        self.wait()
        self._conclude_broken()
        return self._finish()

    def require_complete(self) -> None:
        """Raise on all ranks unless every gradient of this step was given.

        Raises:
            LayoutError: names a missing one.
        """
        lacking = [p.name for p, given in zip(self.layout.parameters, self._given, strict=True) if given is None]
        if lacking and self._failure is None and self._broken is None:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            self.fail(
                LayoutError(
                    f"no gradient of {lacking[0]!r}{more} was given in this step; every parameter of the compressor "
                    "needs one (a zero gradient for an unused parameter)"
                )
            )

    def describe(self) -> dict[str, Any]:
        """What the next step will do, in plain values: see ``compression.describe()``."""
        step, layout = self.state.step, self.layout
        return {
            "step": step,
            "density": self.schedule.density(step),
            "rampup_begin_step": self.schedule.begin,
            "rampup_end_step": self.schedule.ramp_end(),
            "parameters": layout.numel,
            "sparsified_share": layout.sparse_numel / layout.numel if layout.numel else 0.0,
            "buckets": len(layout.buckets),
            "transport": self.transport.name,
            "ranks": self.transport.size,
            "kernels": self._kernels.name,
            "discardable": self.unapplied.exact,
        }

    # -- saving, ending ------------------------------------------------------------------------------------------

    def require_between_steps(self, what: str) -> None:
        """Refuse what would use the transport, or read the state, beside a step.

        Args:
            what: is called, for the message.

        Raises:
            LayoutError: a step is under way on this rank.
        """
        if self.in_step:
            raise LayoutError(
                f"{what} was called while a step is under way; call it after step() or synchronize() or, if an "
                "exception ended the step, after reset() on all ranks"
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain containers of NumPy arrays (copies).

        Raises:
            LayoutError: called in the middle of a step.
        """
        self.require_between_steps("state_dict()")
        return {**self.state.to_dict(), "rank": self.transport.rank, "size": self.transport.size}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned on the same rank of as many ranks.

        All ranks must load together. A step that an exception left half done is abandoned.

        Raises:
            LayoutError: it belongs to another layout, rank or number of ranks; the state was not changed.
        """
        self.abandon()
        size, rank = saved.get("size"), saved.get("rank")
        if size != self.transport.size:
            raise LayoutError(
                f"the saved compressor state is one of {size} ranks, this job has {self.transport.size}; pass the "
                "states of all old ranks and resize=True to redistribute the residuals"
            )
        if rank != self.transport.rank:
            raise LayoutError(
                f"the saved compressor state belongs to rank {rank}, this is rank {self.transport.rank}; residuals "
                "differ between ranks: save and load one state per rank"
            )
        self.state.load(saved)
        self.unapplied.reset()
        self._failure = self._broken = None

    def reset(self) -> None:
        """Forget residuals, momentum, the step and the statistics. All ranks must call it together."""
        self.abandon()
        self._failure = self._broken = None
        self.state.reset()
        self.unapplied.reset()
        self.stats = Stats()

    def abandon(self) -> None:
        """Leave a half-done or broken step behind, putting back what was sent in it; all ranks must call it.

        Until :meth:`reset` or :meth:`load_state_dict` has succeeded, further steps are refused.
        """
        given_up = RemoteError("the step was given up by reset() or load_state_dict()")
        with self._lock:
            under_way = self.in_step
            if self._running:
                # The others may be waiting for this rank's messages: they get an error instead.
                self._failure = self._failure or (given_up, None)
            self._lock.notify_all()
        self.wait()
        if under_way:
            self._broken = self._broken or given_up
        with contextlib.suppress(RuntimeError):  # of a kernel that was interrupted
            self._take_back()

    def close(self) -> bool:
        """End the communication thread. The transport stays open: it belongs to the caller.

        Returns:
            False if the thread still waits for another rank inside the transport, which must then not be closed.
        """
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _required_context(self) -> StepContext:
        assert self._context is not None, "a step is under way"
        return self._context

    def _begin(self) -> None:
        with self._lock:
            if self._context is not None:
                return
            scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
            if not (np.isfinite(scale) and scale > 0):
                refused = ConfigError(f"loss_scale is {scale!r}; allowed: a finite number > 0")
                self._failure = self._failure or (refused, None)
                scale = 1.0
            if not self.unapplied.exact:
                self.unapplied.settle()
            step = self.state.step
            dense = self.schedule.is_dense(step)
            self._context = StepContext(
                step=step,
                density=None if dense else self.schedule.density(step),
                hyper=self.hyper,
                loss_scale=float(scale),
                fingerprint=self.layout.fingerprint ^ self.hyper.digest(),
            )
            self._outcomes = []
            self._current = StepStats()
            self._running = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="dgc-exchange", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def _finish(self) -> bool:
        """What :meth:`finish` does once all buckets are through."""
        context, stats = self._required_context, self._current
        flagged = any(o.flagged for o in self._outcomes)
        if not flagged:
            for step, state, outcome in zip(self._steps, self.state.buckets, self._outcomes, strict=True):
                outcome.flagged = step.overflows(context, state, self._given)
            flagged = any(o.flagged for o in self._outcomes)
        with stats.timed("apply"):
            for step, state, outcome in zip(self._steps, self.state.buckets, self._outcomes, strict=True):
                step.finish(context, state, self._given, outcome, flagged)
        self.state.step += not flagged
        self.unapplied.conclude(context, self._outcomes, refused=flagged)
        self.stats.record(stats, refused=flagged)
        self._end()
        return flagged

    def _end(self) -> None:
        with self._lock:
            self._context = None
            self._given = [None] * len(self.layout.parameters)
            self._missing = [len(b.segments) for b in self.layout.buckets]
            self._outcomes = []

    def _conclude_broken(self) -> None:
        """After a failed step: put back what was sent, and raise."""
        if self._broken is None:
            return
        self._take_back()
        raise self._broken

    def _take_back(self) -> None:
        with contextlib.ExitStack() as stack:  # which goes on when one fails
            stack.callback(self._end)
            for step, state, outcome in zip(self._steps, self.state.buckets, self._outcomes, strict=False):
                stack.callback(step.take_back, state, outcome)

    def _check_usable(self) -> None:
        if self._closed:
            raise TransportError("this compressor was closed; build a new one")
        if self._broken is not None and not self.in_step:
            raise RemoteError(
                f"an earlier step failed ({self._broken}); call reset() or load_state_dict() on all ranks, or restart"
            )

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._running or self._closed)
                if self._closed:
                    self._running = False
                    self._lock.notify_all()
                    return
            try:
                self._run_step()
            except RemoteFailure as failure:
                self._broken = failure.error
            except DGCError as error:
                self._broken = error
            except BaseException as error:
                self._broken = RemoteError(f"the exchange failed: {type(error).__name__}: {error}")
                self._broken.__cause__ = error
            with self._lock:
                self._running = False
                self._lock.notify_all()

    def _run_step(self) -> None:
        self._preparation.start()
        self.unapplied.capture()
        try:
            for index, bucket in enumerate(self.layout.buckets):
                if not self._wait_for_bucket(bucket.index):
                    return
                if index == 0:
                    self.unapplied.require_agreement(self.transport, self._current)
                self._run_bucket(index)
        finally:
            self._preparation.abandon()

    def _wait_for_bucket(self, bucket: int) -> bool:
        """Wait for the bucket's gradients; with global clipping or at its start, for those of all buckets."""

        def ready() -> bool:
            waiting = self._missing if self._preparation.needs_all_gradients else [self._missing[bucket]]
            return not any(waiting) or self._failure is not None or self._closed

        with self._lock:
            self._lock.wait_for(ready)
            return not self._closed

    def _sends_no_more(self, index: int) -> bool:
        """Whether no message follows that of the bucket: it is the last, or an allreduce comes first."""
        last = index == len(self._steps) - 1
        return last or self._steps[index].plan(self._required_context.density).allreduces

    def _run_bucket(self, index: int) -> None:
        context, step = self._required_context, self._steps[index]
        if self._failure is None:
            try:
                self._preparation.make_ready(index, context, self._given, self._current)
                self._preparation.try_following(index, context, self._given, self._current)
                self._outcomes.append(step.run(context, self.state.buckets[index], self._given, self._current))
                return
            except (RemoteFailure, TransportError):
                raise
            except Exception as error:
                if step.sent and (isinstance(error, DGCError) or self._sends_no_more(index)):
                    raise  # the others see it in the messages as well, or cannot hear of it in this step
                wrapped = error if isinstance(error, DGCError) else RemoteError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = None if wrapped is error else error
                self._failure = (wrapped, None)
                if step.sent:
                    return  # the message of the next bucket tells the others
        cause, parameter = self._failure
        try:
            step.send_error(context, cause, parameter, self._current)
        except RemoteFailure as failure:
            failure.error.__cause__ = cause
            raise
