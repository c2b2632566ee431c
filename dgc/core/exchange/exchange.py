"""The exchange of a model's gradients on one rank: gradients in, averaged results out, while the backward pass goes on.

:class:`Step` is the latest step with its table of stages, :class:`Pipeline` the communication thread, on which buckets
run in a fixed order, and :class:`Exchange` the caller's side.
"""

from __future__ import annotations

import enum
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from dgc.core.collectives import Transport, gather_rows
from dgc.core.compressors import compressor_class
from dgc.core.config import DGCConfig, Schedule
from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.encoders import make_encoders
from dgc.core.exchange.nodes import Announced, NodeSums
from dgc.core.exchange.records import (
    AS_BUILT,
    EntrySum,
    Hyper,
    Stats,
    StepContext,
    StepOptions,
    Submission,
    Submissions,
    refused_scale,
)
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Layout
from dgc.core.message import Flags, RemoteFailure
from dgc.core.state import State, require_place
from dgc.errors import DGCError, LayoutError, RemoteError, StallError, TransportError

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
"""(stage, event) -> the next stage. A pair that is missing is an error of this package."""


class Step:
    """The latest step of one exchange, shared by the caller's thread and the communication thread.

    Attributes:
        lock: guards all of this; it is notified of every change.
        stage: where the step stands.
        context: what its buckets share while it is under way.
        error: what ended it, in the stages BROKEN and FAILED.
        announced: an error of this rank, and the parameter it concerns, which its next message carries.
        closed: whether the exchange was closed.
    """

    def __init__(self, buckets: Sequence[BucketExchange]) -> None:
        self.lock = threading.Condition()
        self.stage = Stage.NONE
        self.context: StepContext | None = None
        self.error: DGCError | None = None
        self.announced: tuple[DGCError, int | None] | None = None
        self.closed = False
        self._buckets = buckets
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
    def failure_pending(self) -> bool:
        """Whether an error came too late for its step; the first message of the next one carries it."""
        return self.announced is not None and not self.under_way and self.stage is not Stage.FAILED

    def require_usable(self) -> None:
        """Refuse what would begin or go on with a step."""
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
        """Wait until the error of a broken step was raised; False if ``timeout`` seconds did not suffice."""
        with self.lock:
            return self.lock.wait_for(lambda: self.stage is not Stage.BROKEN or self.closed, timeout)

    # -- events ----------------------------------------------------------------------------------------------------

    def enter(self, event: Event) -> None:
        """Go to the next stage of :data:`TABLE`."""
        with self.lock:
            following = TABLE.get((self.stage, event))
            if following is None:
                raise RuntimeError(f"{event.name} came in the stage {self.stage.name}")
            self.stage = following
            if following not in _UNDER_WAY:
                self.context = None
            self.lock.notify_all()

    def announce(self, error: DGCError, parameter: int | None = None) -> None:
        """Have the next message carry an error of this rank; the first one counts."""
        with self.lock:
            self.announced = self.announced or (error, parameter)
            self.lock.notify_all()

    def begin(self, context: StepContext) -> None:
        """Open a step. The caller holds the lock."""
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
        """End the step by an error; returns the first error, to be raised."""
        self.broke(error)
        self.enter(Event.RAISE)
        return self.error or error

    def recover(self) -> None:
        """Forget the step and its error: the state was reset or loaded."""
        with self.lock:
            self.error = self.announced = None
            self.enter(Event.RESET)

    def close(self) -> None:
        """Let no step begin or go on."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()


def clip_factors(sums_of_squares: np.ndarray, threshold: float, ranks: int, scale: float = 1.0) -> list[float]:
    """Factors that bring each gradient's L2 norm to at most ``threshold * sqrt(ranks)``.

    The paper scales its threshold by N^(-1/2) for gradients already divided by N; on an undivided gradient
    that is ``||g|| <= c * sqrt(N)``.

    Args:
        sums_of_squares: (S,) float64 of the gradients as they arrived.
        threshold: c > 0.
        ranks: N.
        scale: what the gradients are multiplied by before the norm counts (1 / loss scale).

    Source: arXiv 1712.01887, section 3.2; Paddle's dgc_clip_by_norm.
    """
    limit = threshold * math.sqrt(ranks)
    # S is small, and the caches hold gradients: half a dozen NumPy calls would take longer.
    return [limit / n if (n := math.sqrt(s) * scale) > limit else 1.0 for s in sums_of_squares.tolist()]


class Clipping:
    """Fills in a step's clipping factors, bucket by bucket or at once."""

    def __init__(self, config: DGCConfig, kernels: Kernels, ranks: int) -> None:
        """Keep what the factors depend on: ``local_grad_clip_norm``, ``clip_scope``, and the number of ranks N."""
        self.threshold = config.local_grad_clip_norm
        self._kernels = kernels
        self._ranks = ranks
        self.needs_all_gradients = self.threshold is not None and config.clip_scope == "global"
        """Whether one norm is taken over all gradients, so that no bucket may start before all are in."""

    def fill_in(self, step: StepContext, buckets: Iterable[BucketExchange]) -> None:
        """Clip the gradients of ``buckets``, or once all of them; a dense step is clipped globally or not at all."""
        if self.threshold is None:
            return
        chosen: Iterable[int] = range(len(step.scales))
        if not self.needs_all_gradients:
            if step.density is None:
                return
            chosen = [s.parameter for each in buckets for s in each.bucket.sparse]
        squares = self._kernels.sums_of_squares([step.submissions[i].gradient for i in chosen])
        if self.needs_all_gradients:
            squares = np.full(len(squares), squares.sum())
        factors = clip_factors(squares, self.threshold, self._ranks, 1.0 / step.loss_scale)
        for i, factor in zip(chosen, factors, strict=True):
            step.scales[i] *= factor


_CLOSE_PATIENCE = 5.0
"""Seconds that closing waits for a collective under way; a rank that is gone would be waited for for ever."""


_STALL_PATIENCE = 10.0
"""Seconds in which the caller takes the error about a missing rank. It may wait for that rank, too, where nothing ends
the wait: in Horovod's collective of a placeholder."""


class Pipeline:
    """Runs all buckets of each step; the thread starts with the first one."""

    def __init__(
        self,
        buckets: Sequence[BucketExchange],
        clipping: Clipping,
        kernels: Kernels,
        step: Step,
        transport: Transport,
        nodes: NodeSums | None = None,
    ) -> None:
        """Take the parts of an exchange: ``buckets`` in their order, and ``nodes`` where several ranks send as one."""
        self._transport = transport
        self._nodes = nodes
        self._buckets = buckets
        self._clipping = clipping
        self._kernels = kernels
        self._step = step
        self._prepared = self._clipped = self._summed = 0  # buckets before these are
        self._postponed: Exception | None = None  # what a bucket met that was prepared before its turn
        self._thread: threading.Thread | None = None

    def start(self, context: StepContext) -> None:
        """Begin a step, whose gradients arrive from now on. The caller holds the lock."""
        self._prepared = self._clipped = self._summed = 0
        self._postponed = None
        self._step.begin(context)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="dgc-exchange", daemon=True)
            self._thread.start()

    def close(self) -> bool:
        """End the thread.

        Returns:
            False if it still waits for another rank inside the transport, or runs in the process that this one was
            forked from: the transport must then not be closed.
        """
        if self._step.in_child:
            return False
        self._step.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    # -- inside: the communication thread --------------------------------------------------------------------------

    def _loop(self) -> None:
        step = self._step
        self._kernels.adopt_thread()
        while True:
            with step.lock:
                while step.stage is not Stage.OPEN and not step.closed:
                    step.lock.wait()
                if step.closed:
                    if step.stage is Stage.OPEN:
                        step.broke(TransportError("this compressor was closed in the middle of a step"))
                    return
            try:
                with _quiet():
                    done = self._run_step()
            except RemoteFailure as failure:
                step.broke(failure.error)
            except StallError as error:
                step.broke(error)
                if not step.wait_until_raised(_STALL_PATIENCE):
                    self._transport.end_job(error)
            except BaseException as error:
                step.broke(_told(error))
            else:
                if done:
                    step.enter(Event.RUN)

    def _run_step(self) -> bool:
        """Run all buckets; returns False if the exchange was closed before that."""
        context = self._step.context
        assert context is not None, "a step has begun"
        if context.coming_scale is not None and (refused := context.await_scale(context.coming_scale)) is not None:
            self._step.announce(refused)
        try:
            for index in range(len(self._buckets)):
                if not self._wait_for_gradients(context, index):
                    return False
                self._run_bucket(context, index)
        finally:
            for bucket in self._buckets:
                begun, bucket.at.begun = bucket.at.begun, None
                if begun is not None:
                    begun()
        return True

    def _wait_for_gradients(self, context: StepContext, index: int) -> bool:
        """Wait for a bucket's gradients, with global clipping for those of all; returns False if closed."""
        step, missing, last = self._step, context.submissions.missing, index == len(self._buckets) - 1
        whole = self._clipping.needs_all_gradients
        with step.lock:
            while step.announced is None and not step.closed:
                if not (any(missing) if whole else missing[index]) and (context.is_awaited or not last):
                    break
                step.lock.wait()
            return not step.closed

    def _run_bucket(self, context: StepContext, index: int) -> None:
        """Exchange a bucket, or the error that this rank has announced."""
        bucket, step = self._buckets[index], self._step
        announced = step.announced if self._nodes is None else self._add_up(context, index, self._nodes)
        if announced is None:
            try:
                self._prepare(context, index)
                self._prepare_following(context, index)
                bucket.run()
                return
            except (RemoteFailure, TransportError):
                raise
            except Exception as error:
                if bucket.at.is_out and (isinstance(error, DGCError) or self._sends_no_more(index)):
                    raise  # the others see it in the messages as well, or cannot hear of it in this step
                step.announce(_told(error))
                if bucket.at.is_out:
                    return  # the message of the next bucket tells the others
                announced = step.announced
        else:
            step.announce(*announced)
        assert announced is not None
        cause, parameter = announced
        try:
            bucket.send_error(cause, parameter)
        except RemoteFailure as failure:
            failure.error.__cause__ = cause
            raise

    def _sends_no_more(self, index: int) -> bool:
        """Whether no message follows that of the bucket: it is the last, or an allreduce comes first."""
        return index == len(self._buckets) - 1 or self._buckets[index].at.plan.allreduces

    def _add_up(self, context: StepContext, index: int, nodes: NodeSums) -> Announced | None:
        """Where several ranks send as one: add up their gradients; returns what one cannot go on for."""
        stop = len(self._buckets) if self._clipping.needs_all_gradients else index + 1
        buckets = self._buckets[max(index, self._summed) : stop]
        since = time.perf_counter()
        try:
            if self._step.announced is None:
                for each in buckets:
                    each.encoder.await_gradients(context)
                    nodes.collect(context, each.bucket)
        except Exception as error:
            self._step.announce(_told(error))
        announced = nodes.agree(self._step.announced, context, [each.bucket for each in buckets])
        if announced is None:
            for each in buckets:
                nodes.add_up(context, each.bucket)
        context.stats.lap("exchange", since)
        self._summed = max(self._summed, stop)
        return announced

    def _prepare(self, context: StepContext, index: int) -> None:
        """Clip a bucket and let others begin with it, unless that has been done; those before it are."""
        if index < self._prepared:
            return
        if self._postponed is not None:
            raise self._postponed
        bucket, whole = self._buckets[index], self._clipping.needs_all_gradients
        since = time.perf_counter()
        if index >= self._clipped:
            together = self._buckets if whole else [bucket]
            for each in together:
                each.encoder.await_gradients(context)
            self._clipping.fill_in(context, together)
            self._clipped = len(self._buckets) if whole else index + 1
        if context.submissions.absent:
            bucket.keep_absent()
        if self._kernels.overlaps:
            bucket.encoder.begin(bucket.at)
        context.stats.lap("compress", since)
        self._prepared = index + 1

    def _prepare_following(self, context: StepContext, index: int) -> None:
        """Prepare the bucket after ``index``, if that is any use and its gradients are there; on a device all such."""
        if not self._kernels.overlaps or self._nodes is not None:
            return  # which gradients are there differs between the ranks of a node
        stop = index + 1
        while stop < len(self._buckets) and not context.submissions.missing[stop]:
            stop += 1
        try:
            for following in range(index + 1, stop if self._kernels.on_device else min(stop, index + 2)):
                self._prepare(context, following)
        except Exception as error:
            # Raised when it is that bucket's turn and the other ranks can be told. The bucket is not prepared again:
            # that would add its gradients to u and v twice if they have changed.
            self._postponed = error


def _told(error: BaseException) -> DGCError:
    """What is reported to the other ranks of an error here."""
    if isinstance(error, DGCError):
        return error
    wrapped = RemoteError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _quiet() -> np.errstate:
    """Let NumPy not warn of values that are not finite: the exchange looks for them, and refuses the step."""
    return np.errstate(over="ignore", invalid="ignore")


LossScale = float | Callable[[], float | Callable[[], float]]


class Exchange:
    """The compressor of one model on one rank: :meth:`begin` a step, submit its gradients, then :meth:`finish`.

    Attributes:
        state: u, v and the step counter of this rank.
        latest: the latest step: its stage and its error.
        stats: bytes, densities and seconds.
        loss_scale: a float or a callable; asked once per step, with the first gradient. It may return a callable in its
            turn, which is asked on the communication thread: a scale that has to come from a device holds up no hook.
        joined: rank -> its flags, of the ranks that took part in the latest step without data.
        left_alone: parameters of which no rank had a gradient in the latest step: their u and v are as before it.
        on_joined: called with the context of a step in which some ranks did, before it finishes; may be collective.
        selects_from: the first step in which not everything is sent; None if everything is in all steps.
    """

    on_joined: Callable[[StepContext], None] | None = None

    def __init__(
        self,
        layout: Layout,
        config: DGCConfig,
        transport: Transport,
        kernels: Kernels,
        *,
        loss_scale: LossScale = 1.0,
    ) -> None:
        self.layout = layout
        self.config = config
        self.transport = transport
        self.schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
        self.kernels = kernels = kernels.for_exchange()
        self.state = State(layout, kernels, config.own_share(transport.size))
        self.stats = Stats()
        self._hyper = Hyper.uniform(len(layout.parameters), config)
        scheduled = compressor_class(config.algorithm).scheduled
        self.selects_from = self.schedule.selects_from() if scheduled else self.schedule.begin
        self.loss_scale: LossScale = loss_scale
        self.joined: dict[int, int] = {}
        self.left_alone: set[int] = set()
        made = make_encoders(layout, config, kernels, transport)
        self._buckets = [
            BucketExchange(bucket, *each, self.state, kernels, transport, op=config.op)
            for bucket, each in zip(layout.buckets, made, strict=True)
        ]
        self.latest = Step(self._buckets)
        clipping = Clipping(config, kernels, transport.size)
        nodes = None if transport.inside is None else NodeSums(config, kernels, transport)
        self._pipeline = Pipeline(self._buckets, clipping, kernels, self.latest, transport, nodes)
        self._warned = False

    # -- one step ------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether gradients of a step have come in that :meth:`finish` has not ended."""
        return self.latest.under_way

    def begin(self, options: StepOptions = AS_BUILT) -> StepContext:
        """Open a step, before its first gradient.

        Raises:
            DGCError: no step can begin; see :meth:`Step.require_usable`.
            LayoutError: one is under way, since an exception has ended it here. All ranks get it.
        """
        self.latest.require_usable()
        if self.in_step:
            self.fail(
                LayoutError(
                    "a step begins while another one is under way; where an exception has ended that one, call reset() "
                    "on all ranks before the next one"
                )
            )
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        if not callable(scale) and (refused := refused_scale(scale)) is not None:
            self.latest.announce(refused)
            scale = 1.0
        number, hyper = self.state.step, options.hyper or self._hyper
        context = StepContext(
            step=number,
            density=None if number < self.schedule.begin else self.schedule.density(number),
            hyper=hyper,
            loss_scale=1.0 if callable(scale) else float(scale),
            coming_scale=scale if callable(scale) else None,
            fingerprint=self.layout.fingerprint ^ hyper.digest(),
            submissions=Submissions(self.layout),
            options=options,
            is_awaited=not options.holds,
            weight=self._weight() if self.joined else 1.0,
            before=self.state.copy() if options.joins else None,
        )
        with self.latest.lock:
            self._pipeline.start(context)
        return context

    def submit(
        self,
        index: int,
        gradient: np.ndarray,
        result: np.ndarray,
        parameter: np.ndarray | None = None,
        limit: float | None = None,
        ready: object = None,
        *,
        absent: bool = False,
    ) -> None:
        """Hand over one parameter's gradient of this step; its bucket starts when it was the last one.

        Args:
            index: the parameter's place in the layout.
            gradient: (numel,) float16, float32 or float64, contiguous; must stay unchanged until :meth:`finish`.
            result: (numel,) float32 (float64 in float64 buckets), contiguous; may be the gradient's memory.
            parameter: (numel,) the parameter's values; needed when its weight decay is not 0.
            limit: largest finite value of the type that the result will be cast to, if narrower than float32.
            ready: for arrays on a device, see :class:`~dgc.core.exchange.records.Submission`.
            absent: this rank has no gradient, and hands over zeros; see :attr:`left_alone`.

        Raises:
            LayoutError: wrong length, or the parameter was already submitted in this step. All ranks get it.
        """
        self.latest.require_usable()
        built = self.layout.parameters[index]
        if gradient.shape != (built.numel,) or result.shape != (built.numel,):
            wrong = LayoutError(
                f"the gradient of {built.name!r} has {gradient.size} elements, the parameter had {built.numel} when "
                "the compressor was built; build a new compressor when parameters change"
            )
            self.fail(wrong, index)
        try:
            with self.latest.lock:
                context = self.latest.context or self.begin()
                context.has_limits |= limit is not None
                if context.submissions.add(index, Submission(gradient, result, parameter, limit, ready, absent)):
                    self.latest.lock.notify_all()
        except LayoutError as error:
            self.fail(error, index)

    def fail(self, error: DGCError, parameter: int | None = None) -> NoReturn:
        """Report to all ranks that this one cannot go on, and raise the error here afterwards.

        When all buckets are through, the others finish the step; the error reaches them in the next one, if this rank
        takes part in it.

        Raises:
            DGCError: always; ``error``, or the error of another rank that failed before.
        """
        step = self.latest
        step.require_usable()
        with step.lock:
            if step.context is None:
                self.begin()
            step.announce(error, parameter)
        self.wait()
        if step.stage is Stage.THROUGH:
            # The step counts here as it does on the others: the next message must be as long as theirs.
            self.finish()
            raise error
        raise step.fail(error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all buckets of the step are through; returns False when ``timeout`` seconds did not suffice."""
        context = self.latest.context
        if context is None:
            return True
        since = time.perf_counter()
        with self.latest.lock:
            context.is_awaited = True
            self.latest.lock.notify_all()
            done = self.latest.lock.wait_for(lambda: self.latest.stage is not Stage.OPEN, timeout)
        context.stats.lap("wait", since)
        return done

    def finish(self) -> bool:
        """Wait until all buckets are through, write the results of dense tensors, and commit the step.

        What was sent leaves the residual. When every rank has joined, nobody had a gradient: the exchange is undone.

        Returns:
            True when the step was refused because a rank met a non-finite value: the gradient stays in the residual,
            the flagged results are NaN, and the schedule has not advanced.

        Raises:
            LayoutError: a gradient is missing. All ranks get it.
            DGCError: this rank or another one failed.
        """
        step = self.latest
        step.require_usable()
        if step.announced is not None and step.failure_pending:
            # It came too late for its step: the others are in the next one.
            self.fail(*step.announced)
        if (missing := self.missing()) and step.announced is None and step.error is None:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            wrong = LayoutError(
                f"no gradient of {self.layout.parameters[missing[0]].name!r}{more} was given in this step; every "
                "parameter of the compressor needs one (a zero gradient for an unused parameter)"
            )
            self.fail(wrong)
        self.wait()
        if step.error is not None:
            raise step.fail(step.error)
        context = step.context
        assert context is not None, "a step is under way"
        if self.on_joined is not None and 0 < len(context.joined) < self.transport.size:
            self.on_joined(context)
        since = time.perf_counter()
        with _quiet():
            refused = self._end_step(context)
        self.state.step += not refused
        self.joined = context.joined
        if context.before is not None and len(self.joined) == self.transport.size:
            self.state.assign(context.before)
        step.enter(Event.REFUSE if refused else Event.COMMIT)
        context.stats.lap("apply", since)
        self.stats.record(context.stats, refused=refused)
        return refused

    def _end_step(self, context: StepContext) -> bool:
        """Refuse or commit the step in each bucket; returns whether it is refused."""
        flagged = [bucket for bucket in self._buckets if bucket.at.flagged]
        if not flagged and context.has_limits:
            flagged = [bucket for bucket in self._buckets if bucket.vector.overflows(context, bucket.at.state.u)]
            for bucket in flagged:
                bucket.at.flagged = True
        if flagged and not callable(self.loss_scale):
            self._warn_of_refusal(flagged[0])
        self.left_alone = self._absent_everywhere(context) if context.submissions.absent else set()
        for bucket in self._buckets:
            bucket.finish(refused=bool(flagged), left_alone=self.left_alone)
        return bool(flagged)

    def missing(self) -> list[int]:
        """Parameters whose gradients of the step under way were not given."""
        given = () if self.latest.context is None else self.latest.context.submissions
        return sorted(set(range(len(self.layout.parameters))).difference(given))

    def _absent_everywhere(self, context: StepContext) -> set[int]:
        """Parameters of which no rank has a gradient. Collective where all ranks lack some, and not the same."""
        buckets = [bucket for bucket in self._buckets if all(bucket.at.absent)]
        own = {s.parameter for bucket in buckets for s in bucket.at.kept}
        if all(len(set(bucket.at.absent)) == 1 for bucket in buckets):
            return own
        mine = np.array([i in own for i in range(len(self.layout.parameters))], np.uint8)
        rows = gather_rows(self.transport, mine)
        context.stats.count_collective(mine.size)
        return {int(i) for i in np.flatnonzero(rows.all(axis=0))}

    # -- results that were not written -------------------------------------------------------------------------------

    def deferred(self) -> list[EntrySum]:
        """The results of the latest step that were not written; only once."""
        return list(filter(None, map(BucketExchange.take_deferred, self._buckets)))

    def write_deferred(self) -> None:
        """Write those results where they were to go; the arrays that were given must still be there."""
        for bucket in self._buckets:
            bucket.write_deferred()

    # -- saving, ending ------------------------------------------------------------------------------------------

    def require_between_steps(self, what: str) -> None:
        """Refuse what would use the transport, or read the state, beside a step."""
        if self.in_step:
            raise LayoutError(
                f"{what} was called while a step is under way; call it after step() or synchronize() or, if an "
                "exception ended the step, after reset() on all ranks"
            )

    def require_whole(self, what: str) -> None:
        """Refuse what would save the state, where it is not that of a moment between two steps.

        A step that failed is half in it.
        """
        self.require_between_steps(what)
        step = self.latest
        if step.failure_pending or step.stage is Stage.FAILED:
            cause = step.error or (step.announced or ["?"])[0]
            raise LayoutError(
                f"{what} was called after a step that failed ({cause}), whose gradients are half in this rank's "
                "momentum and residuals; go on from the last checkpoint, or call reset() on all ranks, which drops "
                "momentum and residuals, and save then"
            )

    def residual_norm(self) -> float:
        """L2 norm of what this rank has not sent yet."""
        return self.state.residual_norm()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain containers of NumPy arrays, as copies."""
        self.require_whole("state_dict()")
        return {**self.state.to_dict(), **self.transport.rank_info(), "op": self.config.op}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned on the same rank of as many ranks.

        All ranks must load together. A step that an exception left half done is abandoned.

        Raises:
            LayoutError: it belongs to another layout, rank, number of ranks or op; the state was not changed.
        """
        self.abandon()
        require_place(saved, op=self.config.op, **self.transport.rank_info())
        self.state.load(saved)
        self.latest.recover()

    def reset(self) -> None:
        """Forget residuals, momentum, the step and the statistics. All ranks must call it together."""
        self.abandon()
        self.latest.recover()
        self.state.reset()
        self.stats = Stats()

    def abandon(self) -> bool:
        """Leave a half-done or broken step behind; all ranks must call it.

        Until :meth:`reset` or :meth:`load_state_dict` has succeeded, further steps are refused. Returns whether all
        buckets have run of a step that is half done, or of one whose error came too late: all ranks had handed over
        all their gradients, and none an error.
        """
        given_up = RemoteError("the step was given up by reset() or load_state_dict()")
        with self.latest.lock:
            under_way = self.in_step
            if self.latest.stage is Stage.OPEN:
                self.latest.announce(given_up)  # the others may be waiting for this rank's messages
        self.wait()
        through = self.latest.stage is Stage.THROUGH or self.latest.failure_pending
        if under_way:
            self.latest.fail(given_up)
        return through

    def close(self) -> bool:
        """End the communication thread; False where the transport must not be closed: see :meth:`Pipeline.close`."""
        return self._pipeline.close()

    def _weight(self) -> float:
        """What the gradients are multiplied by, since results are divided by the number of all ranks."""
        ranks, joined = self.transport.size, len(self.joined)
        by_training = any(f & Flags.BY_TRAINING for f in self.joined.values())
        return ranks / (ranks - joined) if by_training and self.config.op == "average" and joined < ranks else 1.0

    def _warn_of_refusal(self, bucket: BucketExchange) -> None:
        """Once, where no GradScaler skips the step: on ranks that met the value, and on rank 0."""
        ranks, own = bucket.at.flagged_by, self.transport.rank
        inside = self.transport.inside
        if not (self._warned or (own not in ranks and own != 0) or (inside is not None and inside.rank)):
            self._warned = True
            names = [p.name for p in self.layout.parameters]
            warnings.warn(bucket.refusal(own, names), RuntimeWarning, stacklevel=4)
