"""The exchange of a model's gradients on one rank. It runs during the backward pass and returns averaged results."""

from __future__ import annotations

import collections
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from dgc.core.collectives import Transport, gather_rows
from dgc.core.compressors import compressor_class
from dgc.core.config import DGCConfig, Schedule
from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.choice import make_plans
from dgc.core.exchange.nodes import NodeSums
from dgc.core.exchange.pipeline import Clipping, Pipeline, quiet
from dgc.core.exchange.stages import Event, LatestStep, Stage, as_dgc_error
from dgc.core.exchange.stats import Stats
from dgc.core.exchange.step import AS_BUILT, Hyper, Step, StepOptions, Submission, Submissions, refused_scale
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Layout
from dgc.core.message import Flags, RemoteFailure
from dgc.core.saved import on_ranks, require_op, require_sound
from dgc.core.state import State
from dgc.errors import ConfigError, DGCError, LayoutError, RemoteError

LossScale = float | Callable[[], float | Callable[[], float]]


class Exchange:
    """The exchange of one model on one rank: :meth:`begin` a step, :meth:`submit` its gradients, then :meth:`finish`.

    Attributes:
        state: u, v and the step counter of this rank.
        latest: the latest step: its stage and its error.
        stats: bytes, densities and seconds.
        loss_scale: a float, or a callable that is called once per step, at the first gradient. It may return another
            callable, which is called on the communication thread. So no hook waits for a scale that is on a device.
        joined: the flags, by rank, of the ranks that took part in the latest step without data.
        edited: the ranks whose parameters were changed outside of ``step()`` before the latest step.
        left_alone: parameters without a gradient on any rank in the latest step; the step has not changed their u and
            v.
        refused: whether the latest step was refused because a rank met a value that is not finite.
        on_joined: called with each step in which some ranks took part without data, before that step finishes. The
            call may be collective.
        on_refused: called with the bucket that met a value that is not finite, in place of a warning.
        selects_from: the first step in which only some entries are sent; None if all steps send all entries.
    """

    on_joined: Callable[[Step], None] | None = None
    on_refused: Callable[[BucketExchange], None] | None = None
    refused = False

    def __init__(
        self, layout: Layout, config: DGCConfig, transport: Transport, kernels: Kernels, *, loss_scale: LossScale = 1.0
    ) -> None:
        self.layout, self.config, self.transport = layout, config, transport
        self.kernels = kernels = kernels.for_exchange()
        self.schedule = Schedule(config.sparsities, config.rampup_begin_step, config.rampup_step)
        plans = make_plans(layout, config, kernels, transport)
        self.state = State(layout, kernels.memory, config.own_share(transport.size), [each.stripes for each in plans])
        self.stats = Stats()
        self.loss_scale: LossScale = loss_scale
        self.joined: dict[int, int] = {}
        self.edited: set[int] = set()
        self.left_alone: set[int] = set()
        scheduled = compressor_class(config.algorithm).scheduled
        self.selects_from = self.schedule.selects_from() if scheduled else self.schedule.begin
        self.latest = LatestStep()
        self._buckets = [
            BucketExchange(bucket, each, self.state, config, kernels, transport)
            for bucket, each in zip(layout.buckets, plans, strict=True)
        ]
        clipping = Clipping(config, kernels, transport.size)
        nodes = None if transport.inside is None else NodeSums(config, kernels, transport)
        self._pipeline = Pipeline(self._buckets, clipping, kernels, self.latest, transport, nodes)
        self._hyper = Hyper.uniform(len(layout.parameters), config)
        self._warned = False

    def ways(self) -> str:
        """Say how buckets are exchanged after the ramp-up: "gathered", "owners", "dense sum", or how many of each."""
        plans = [each.plans[1.0 - self.config.sparsities[-1]] for each in self._buckets]
        count = collections.Counter(plan.way for plan in plans)
        return ", ".join(f"{way}: {n}" for way, n in sorted(count.items())) if len(count) > 1 else plans[0].way

    # -- one step ------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and :meth:`finish` has not ended it."""
        return self.latest.under_way

    def begin(self, options: StepOptions = AS_BUILT) -> Step:
        """Open a step, before its first gradient.

        Raises:
            DGCError: no step can begin; see :meth:`LatestStep.require_usable`.
            LayoutError: the last step has not ended, perhaps because of an exception. All ranks get this error.
        """
        self.latest.require_usable()
        if self.in_step:
            self.fail(
                LayoutError(
                    "a step begins while another one is under way; if an exception has ended that one, call reset() "
                    "on all ranks before the next one"
                )
            )
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        if not callable(scale) and (refused := refused_scale(scale)) is not None:
            self.latest.announce(refused)
            scale = 1.0
        step = self._make_step(options, scale)
        self.state.is_equal = self.transport.size == 1
        with self.latest.lock:
            self._pipeline.start(step)
        return step

    def _make_step(self, options: StepOptions, scale: Any) -> Step:
        number, hyper = self.state.step, options.hyper or self._hyper
        return Step(
            number,
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

    def meet(self, call: str) -> None:
        """Require that all ranks make this call now, and that none of them makes a step. Collective, between steps.

        Its message is that of a step's first bucket, and carries an error. So a rank in a step raises the error, too.
        The bytes are not counted: no entry is among them.

        Raises:
            ConfigError: another rank makes a step.
            DGCError: another rank has failed.
        """
        self.latest.require_usable()
        step, bucket = self._make_step(AS_BUILT, 1.0), self._buckets[0]
        bucket.start(step)
        error = ConfigError(f"it calls {call}, and another rank makes a step: call {call} on all ranks, or on none")
        try:
            bucket.send_error(error, None)
        except RemoteFailure as failure:
            if not bucket.plan.messages.are_equal:
                raise failure.error from None

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
        """Give one parameter's gradient of this step to the exchange. The last gradient of a bucket starts the bucket.

        Args:
            index: the parameter's place in the layout.
            gradient: (numel,) float16, float32 or float64, contiguous; it must not change until :meth:`finish`.
            result: (numel,) float32 (float64 in float64 buckets), contiguous; may be the gradient's memory.
            parameter: (numel,) the parameter's values; needed if its weight decay is not 0.
            limit: the largest finite value of the type that the result will be cast to, if narrower than float32.
            ready: for arrays on a device, see :class:`~dgc.core.exchange.step.Submission`.
            absent: this rank has no gradient, and gives zeros; see :attr:`left_alone`.

        Raises:
            LayoutError: the length is wrong, or the parameter was submitted before in this step. All ranks get this
                error.
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
                step = self.latest.step or self.begin()
                step.has_limits |= limit is not None
                if step.submissions.add(index, Submission(gradient, result, parameter, limit, ready, absent)):
                    self.latest.lock.notify_all()
        except LayoutError as error:
            self.fail(error, index)

    def fail(self, error: DGCError, parameter: int | None = None) -> NoReturn:
        """Report an error of this rank to all ranks, and raise it.

        If all buckets have run already, the other ranks finish the step. They get the error in the next step, if this
        rank takes part in that step.

        Raises:
            DGCError: always; ``error``, or the error of another rank that failed before.
        """
        latest = self.latest
        latest.require_usable()
        with latest.lock:
            if latest.step is None:
                self.begin()
            latest.announce(error, parameter)
        self.wait()
        if latest.stage is Stage.THROUGH:
            # Count the step as the other ranks do: this rank's next message must be as long as theirs.
            self.finish()
            raise error
        raise latest.fail(error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all buckets of the step have run; return False if that takes more than ``timeout`` seconds."""
        step = self.latest.step
        if step is None:
            return True
        since = time.perf_counter()
        with self.latest.lock:
            step.is_awaited = True
            self.latest.lock.notify_all()
            done = self.latest.lock.wait_for(lambda: self.latest.stage is not Stage.OPEN, timeout)
        step.stats.lap("wait", since)
        return done

    def finish(self) -> bool:
        """Wait until all buckets have run, write the results, and commit the step. Call it after the backward pass.

        To commit a step is to remove what was sent from the residual. If every rank has joined, nobody had a gradient,
        and the exchange is undone.

        Returns:
            True if the step was refused because a rank met a value that is not finite. Then the gradient stays in the
            residual, the flagged results are NaN, and the schedule has not advanced.

        Raises:
            LayoutError: a gradient is missing. All ranks get this error.
            DGCError: this rank or another one failed. If a commit fails on this rank, the others get the error in the
                next step.
        """
        latest = self.latest
        latest.require_usable()
        if latest.announced is not None and latest.failure_pending:
            # The error came too late for its step: the other ranks are in the next step.
            self.fail(*latest.announced)
        if (missing := self.missing()) and latest.announced is None and latest.error is None:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            wrong = LayoutError(
                f"no gradient of {self.layout.parameters[missing[0]].name!r}{more} was given in this step; every "
                "parameter of the compressor needs one (a zero gradient for an unused parameter)"
            )
            self.fail(wrong)
        self.wait()
        if latest.error is not None:
            raise latest.fail(latest.error)
        step = latest.step
        assert step is not None, "a step is under way"
        if self.on_joined is not None and 0 < len(step.joined) < self.transport.size:
            self.on_joined(step)
        since = time.perf_counter()
        with quiet():
            refused = any(bucket.flagged for bucket in self._buckets)
            try:
                for bucket in self._buckets:
                    bucket.write_results()
                refused = self._is_refused(step)
                self._end_buckets(step, refused=refused)
            except BaseException as error:
                # Some buckets have ended the step, and others have not. End it here, too, so that no bucket commits it
                # twice. The other ranks have ended it; this rank's next message tells them of the error.
                self._count(step, refused=refused)
                latest.announce(error)
                if isinstance(error, DGCError) or not isinstance(error, Exception):
                    raise
                raise as_dgc_error(error) from error
        self._count(step, refused=refused)
        step.stats.lap("write", since)
        self.stats.record(step.stats, refused=refused)
        self.refused = refused
        return refused

    def _is_refused(self, step: Step) -> bool:
        """Return whether the step is refused, as on all ranks."""
        flagged = [bucket for bucket in self._buckets if bucket.flagged]
        if not flagged and step.has_limits:
            flagged = [bucket for bucket in self._buckets if bucket.overflows()]
        if flagged and self.on_refused is not None:
            self.on_refused(flagged[0])
        elif flagged and not callable(self.loss_scale):
            self._warn_of_refusal(flagged[0])
        return bool(flagged)

    def _end_buckets(self, step: Step, *, refused: bool) -> None:
        """Refuse or commit the step in each bucket."""
        self.left_alone = self._absent_everywhere(step) if step.submissions.absent else set()
        for bucket in self._buckets:
            bucket.finish(refused=refused, left_alone=self.left_alone)
        if step.before is not None and self._is_undone(step):
            self.state.assign(step.before)

    def _count(self, step: Step, *, refused: bool) -> None:
        """Count the step as all ranks do, and end it."""
        self.state.step = step.number + (not refused and not self._is_undone(step))
        self.joined, self.edited = step.joined, step.edited
        self.latest.enter(Event.REFUSE if refused else Event.COMMIT)

    def _is_undone(self, step: Step) -> bool:
        return len(step.joined) == self.transport.size

    def _absent_everywhere(self, step: Step) -> set[int]:
        """Return the parameters that have no gradient on any rank.

        This is collective if every rank lacks some gradients of a bucket, but different ranks lack different ones.
        """
        lacking = [bucket for bucket in self._buckets if all(bucket.absent)]
        own = {s.parameter for bucket in lacking for s in bucket.kept}
        if all(len(set(bucket.absent)) == 1 for bucket in lacking):
            return own
        mine = np.array([i in own for i in range(len(self.layout.parameters))], np.uint8)
        rows = gather_rows(self.transport, mine)
        step.stats.count_collective(mine.size)
        return {int(i) for i in np.flatnonzero(rows.all(axis=0))}

    def missing(self) -> list[int]:
        """Return the parameters whose gradients were not given in the current step."""
        given = () if self.latest.step is None else self.latest.step.submissions
        return sorted(set(range(len(self.layout.parameters))).difference(given))

    # -- saving, ending ------------------------------------------------------------------------------------------

    def require_between_steps(self, what: str) -> None:
        """Refuse, in the middle of a step, a call that uses the transport or reads the state."""
        if self.in_step:
            raise LayoutError(
                f"{what} was called while a step is under way; call it after step() or synchronize() or, if an "
                "exception ended the step, after reset() on all ranks"
            )

    @property
    def has_failed(self) -> bool:
        """Whether the latest step has failed, so that the state may hold a part of it."""
        return self.latest.failure_pending or self.latest.stage is Stage.FAILED

    def require_whole(self, what: str) -> None:
        """Refuse to save the state in the middle of a step, or after a failed step: it may hold part of that step."""
        self.require_between_steps(what)
        latest = self.latest
        if self.has_failed:
            cause = latest.error or (latest.announced or ["?"])[0]
            raise LayoutError(
                f"{what} was called after a step that failed ({cause}), of which this rank's momentum and residuals "
                "hold only some gradients; load the last checkpoint, or call reset() on all ranks, which drops "
                "momentum and residuals, and save then"
            )

    def average(self) -> None:
        """Make the state equal on all ranks: see :meth:`dgc.core.state.State.average`. Collective, between steps."""
        self.require_whole("average()")
        self.stats.total.count_collective(self.state.average(self.transport, self.schedule.begin))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state as plain containers of NumPy arrays."""
        self.require_whole("state_dict()")
        return {**self.state.to_dict(), "size": self.transport.size, "op": self.config.op}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, after :meth:`average` also in a job of another size.

        All ranks must load at the same time. An unfinished step is abandoned.

        Raises:
            LayoutError: it belongs to another layout or op. The present state is not changed.
        """
        self.abandon()
        require_sound(saved)
        require_op(saved, self.config.op)
        self.state.load(on_ranks(saved, self.transport.size))
        self.latest.recover()
        self.joined = {}

    def reset(self) -> None:
        """Forget residuals, momentum, the step and the statistics. All ranks must call it together."""
        self.abandon()
        self.latest.recover()
        self.state.reset()
        self.stats, self.joined = Stats(), {}

    def abandon(self) -> bool:
        """Give up an unfinished or broken step. All ranks must call it.

        Until :meth:`reset` or :meth:`load_state_dict` has succeeded, further steps are refused.

        Returns:
            Whether all buckets had run, in the unfinished step or in a step whose error came too late. If so, all
            ranks had given all their gradients.
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
        """End the communication thread; return False if the transport must stay open: see :meth:`Pipeline.close`."""
        return self._pipeline.close()

    def _weight(self) -> float:
        """Return a factor for all gradients: it turns the average over all ranks into one over the training ranks."""
        ranks, joined = self.transport.size, len(self.joined)
        by_training = any(f & Flags.BY_TRAINING for f in self.joined.values())
        return ranks / (ranks - joined) if by_training and self.config.op == "average" and joined < ranks else 1.0

    def _warn_of_refusal(self, bucket: BucketExchange) -> None:
        """Warn once, on rank 0 and on the ranks that met the value. Called if no GradScaler skips the step."""
        ranks, own = bucket.flagged_by, self.transport.rank
        inside = self.transport.inside
        if not (self._warned or (own not in ranks and own != 0) or (inside is not None and inside.rank)):
            self._warned = True
            names = [p.name for p in self.layout.parameters]
            warnings.warn(bucket.refusal(own, names), RuntimeWarning, stacklevel=4)
