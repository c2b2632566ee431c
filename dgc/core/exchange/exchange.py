"""One training step over all buckets: gradients in, averaged results out, while the backward pass goes on.

The caller's side; the buckets run in :mod:`~dgc.core.exchange.pipeline`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from dgc.core.config import DENSITY_DIGITS, DGCConfig, Schedule
from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.encoders.choose import make_encoders
from dgc.core.exchange.gradients.clipping import Clipping
from dgc.core.exchange.gradients.nodes import NodeSums
from dgc.core.exchange.pipeline import Pipeline
from dgc.core.exchange.records import EntrySum, Hyper, Stats, StepContext, Submission, Submissions, refused_scale
from dgc.core.exchange.step import Stage, Step
from dgc.core.header import Flags
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Layout
from dgc.core.state import State, require_place
from dgc.core.transport import Transport
from dgc.errors import DGCError, LayoutError, RemoteError

LossScale = float | Callable[[], float | Callable[[], float]]


class Exchange:
    """The compressor of one model on one rank: submit every gradient of a step, then :meth:`finish`.

    Attributes:
        state: u, v and the step counter of this rank.
        latest: the latest step: its stage, its error, and the way back.
        stats: bytes, densities and seconds.
        hyper: momentum, Nesterov and weight decay by parameter; the adapter may replace it between steps.
        loss_scale: a float or a callable; asked once per step, with the first gradient. It may return a callable in its
            turn, which is asked on the communication thread: a scale that has to come from a device holds up no hook.
        awaits_update: whether the caller reports what becomes of a finished step: :meth:`applied` or :meth:`drop`.
            Otherwise each one counts once it is finished, unless it was refused.
        holds: whether the last bucket of steps that begin from now on waits until the caller waits for the results: an
            error that the caller meets before that is sent in the same step.
        defers: whether steps that begin from now on may leave sums of entries to the caller, who calls :meth:`deferred`
            or :meth:`write_deferred` after :meth:`finish`.
        joins: flags of :class:`~dgc.core.header.Flags` while this rank takes part without data: it submits zeros,
            and can drop a step exactly.
        joined: rank -> those flags, of the ranks that took part in the latest step like that.
        left_alone: parameters of which no rank had a gradient in the latest step: their u and v are as before it.
        on_joined: called with the context of a step in which some ranks did, before it finishes; may be collective.
    """

    awaits_update = False
    holds = False
    defers = False
    joins = 0
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
        self.joined: dict[int, int] = {}
        self.left_alone: set[int] = set()
        self._kernels = kernels
        made = make_encoders(layout, config, kernels, transport)
        self._buckets = [
            BucketExchange(bucket, *each, self.state, kernels, transport, op=config.op)
            for bucket, each in zip(layout.buckets, made, strict=True)
        ]
        self.latest = Step(self.state, self._buckets)
        clipping = Clipping(config, kernels, transport.size)
        nodes = None if transport.inside is None else NodeSums(config, kernels, transport)
        self._pipeline = Pipeline(self._buckets, clipping, kernels, self.latest, transport, nodes)
        self._warned = False

    # -- one step ------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether gradients of a step have come in that :meth:`finish` has not ended."""
        return self.latest.under_way

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
                context = self.latest.context or self._begin()
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
                self._begin()
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
        done = self.latest.wait(timeout)
        context.stats.lap("wait", since)
        return done

    def finish(self) -> bool:
        """Wait until all buckets are through and write the results of dense tensors.

        Returns:
            True when the step was refused because a rank met a non-finite value: nothing that was sent counts, the
            flagged results are NaN, and the schedule has not advanced.

        Raises:
            LayoutError: a gradient is missing. All ranks get it.
            DGCError: this rank or another one failed.
        """
        step = self.latest
        step.require_usable()
        if step.failure_pending and step.announced is not None:
            # It came too late for its step: the others are in the next one.
            self.fail(*step.announced)
        self.require_complete()
        self.wait()
        if step.error is not None:
            raise step.fail(step.error)
        context = step.context
        assert context is not None, "a step is under way"
        if self.on_joined is not None and 0 < len(context.joined) < self.transport.size:
            self.on_joined(context)
        since = time.perf_counter()
        flagged = [bucket for bucket in self._buckets if bucket.at.flagged]
        if not flagged and context.has_limits:
            asked = [(b, b.vector.overflows(context, b.at.state.u)) for b in self._buckets]
            flagged = [bucket for bucket, overflows in asked if overflows()]
            for bucket in flagged:
                bucket.at.flagged = True
        refused = bool(flagged)
        if flagged and not callable(self.loss_scale):
            self._warn_of_refusal(flagged[0])
        self.left_alone = self._absent_everywhere(context)
        for bucket in self._buckets:
            bucket.finish(refused=refused, left_alone=self.left_alone)
        self.state.step += not refused
        self.joined = context.joined
        step.finish(refused=refused)
        if not self.awaits_update:
            step.applied()
        context.stats.lap("apply", since)
        self.stats.record(context.stats, refused=refused)
        return refused

    def missing(self) -> list[int]:
        """Parameters whose gradients of the step under way were not given."""
        given = () if self.latest.context is None else self.latest.context.submissions
        return [i for i in range(len(self.layout.parameters)) if i not in given]

    def _absent_everywhere(self, context: StepContext) -> set[int]:
        """Parameters of which no rank has a gradient. Collective where all ranks lack some, and not the same."""
        buckets = [bucket for bucket in self._buckets if all(bucket.at.absent)]
        own = {s.parameter for bucket in buckets for s in bucket.at.kept}
        if all(len(set(bucket.at.absent)) == 1 for bucket in buckets):
            return own
        mine = np.array([i in own for i in range(len(self.layout.parameters))], np.uint8)
        rows = np.empty((self.transport.size, mine.size), np.uint8)
        self.transport.allgather(mine, rows)
        context.stats.count_collective(mine.size)
        return {int(i) for i in np.flatnonzero(rows.all(axis=0))}

    def require_complete(self) -> None:
        """Raise on all ranks unless every gradient of this step was given.

        Raises:
            LayoutError: names a missing one.
        """
        step = self.latest
        if (missing := self.missing()) and step.announced is None and step.error is None:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            error = LayoutError(
                f"no gradient of {self.layout.parameters[missing[0]].name!r}{more} was given in this step; every "
                "parameter of the compressor needs one (a zero gradient for an unused parameter)"
            )
            self.fail(error)

    # -- after the exchange: applied or dropped --------------------------------------------------------------------

    def applied(self) -> None:
        """The optimizer applies the latest step: it counts."""
        self.latest.applied()

    def drop(self) -> bool:
        """See :meth:`~dgc.core.exchange.step.Step.drop`."""
        return self.latest.drop()

    def deferred(self) -> list[EntrySum]:
        """The results of the latest step that were not written; only once."""
        return [total for bucket in self._buckets if (total := bucket.take_deferred()) is not None]

    def write_deferred(self) -> None:
        """Write those results where they were to go; the arrays that were given must still be there."""
        for bucket in self._buckets:
            bucket.write_deferred()

    def describe(self) -> dict[str, Any]:
        """What the next step will do, in plain values: see ``compression.describe()``."""
        step, layout = self.state.step, self.layout
        return {
            "step": step,
            "density": round(self.schedule.density(step), DENSITY_DIGITS),
            "rampup_begin_step": self.schedule.begin,
            "rampup_end_step": self.schedule.ramp_end(),
            "parameters": layout.numel,
            "small": self.config.small,
            "sparsified_share": layout.sparse_numel / layout.numel if layout.numel else 0.0,
            "buckets": len(layout.buckets),
            "transport": self.transport.name,
            "ranks": self.transport.rank_info()["size"],
            "kernels": self._kernels.name,
        }

    # -- saving, ending ------------------------------------------------------------------------------------------

    def require_between_steps(self, what: str) -> None:
        """Refuse what would use the transport, or read the state, beside a step.

        Raises:
            LayoutError: a step is under way on this rank, where ``what`` is called.
        """
        if self.in_step:
            raise LayoutError(
                f"{what} was called while a step is under way; call it after step() or synchronize() or, if an "
                "exception ended the step, after reset() on all ranks"
            )

    def require_whole(self, what: str) -> None:
        """Refuse what would save the state, where it is not that of a moment between two steps.

        A step that failed is half in it.

        Raises:
            LayoutError: a step is under way on this rank, or one has failed, where ``what`` is called.
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
        """L2 norm of what this rank has not sent yet, an undecided step taken for an applied one."""
        return self.latest.counted().residual_norm()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain containers of NumPy arrays (copies), an undecided step taken for an applied one.

        Raises:
            LayoutError: called in the middle of a step, or after one that failed.
        """
        self.require_whole("state_dict()")
        return {**self.latest.counted().to_dict(), **self.transport.rank_info(), "op": self.config.op}

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

    def abandon(self) -> None:
        """Leave a half-done or broken step behind; all ranks must call it.

        Until :meth:`reset` or :meth:`load_state_dict` has succeeded, further steps are refused.
        """
        given_up = RemoteError("the step was given up by reset() or load_state_dict()")
        with self.latest.lock:
            under_way = self.in_step
            if self.latest.stage is Stage.OPEN:
                self.latest.announce(given_up)  # the others may be waiting for this rank's messages
        self.wait()
        if under_way:
            self.latest.fail(given_up)

    def close(self) -> bool:
        """End the communication thread; False where the transport must not be closed: see :meth:`Pipeline.close`."""
        return self._pipeline.close()

    def _begin(self) -> StepContext:
        """The context of a new step. The caller holds the lock."""
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        if not callable(scale) and (refused := refused_scale(scale)) is not None:
            self.latest.announce(refused)
            scale = 1.0
        number = self.state.step
        context = StepContext(
            step=number,
            density=None if self.schedule.is_dense(number) else self.schedule.density(number),
            hyper=self.hyper,
            loss_scale=1.0 if callable(scale) else float(scale),
            coming_scale=scale if callable(scale) else None,
            fingerprint=self.layout.fingerprint ^ self.hyper.digest(),
            submissions=Submissions(self.layout),
            is_awaited=not self.holds,
            defers=self.defers,
            joins=self.joins,
            weight=self._weight() if self.joined else 1.0,
        )
        self._pipeline.start(context)
        return context

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
            warnings.warn(bucket.refusal(own, names), RuntimeWarning, stacklevel=3)
