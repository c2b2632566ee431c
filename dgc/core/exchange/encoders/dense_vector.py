"""What is summed densely in a bucket: dense tensors in every step, and all tensors where a dense sum is cheaper.

The *vector* of a step covers positions ``plan.vector_start`` to ``bucket.size``. It goes into the message or through an
allreduce; afterwards it holds the mean (or sum) over the ranks. Small tensors may go into the message coded; what their
codec loses is added to their gradients in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dgc.core.exchange.records import Hyper, StepContext
from dgc.core.kernels.base import Array, Kernels, MomentumRule
from dgc.core.kernels.device import DeviceKernels, Part
from dgc.core.layout import Bucket, Segment
from dgc.core.message import Incoming
from dgc.core.plan import BucketPlan, Mode
from dgc.core.state import BucketState
from dgc.errors import WireError

SMALL = 4096
"""Elements up to which tensors are updated together: a copy of that many takes less time than a call."""


def is_finite(values: np.ndarray) -> bool:
    """Whether all of (n,) values are; one read without temporaries where their squares add up to a finite number."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())


class DenseVector:
    """The vector of one bucket, on the host, with its way in and its way out.

    Attributes:
        values: (plan.vector_size,) float32, float64 in float64 buckets.
        segments: those that are sent dense in this step.
    """

    segments: tuple[Segment, ...] = ()
    _plan: BucketPlan | None = None
    _first = 0
    """The vector's start in the bucket."""

    def __init__(self, bucket: Bucket, kernels: Kernels, own_share: float = 1.0, keeps_error: bool = True) -> None:
        """Allocate nothing yet: memory comes with the first plan that needs it.

        Args:
            bucket: the bucket.
            kernels: where its u is.
            own_share: what part of a summed gradient is a rank's own: 1 / P with op=Sum. The u of a sparsified tensor
                is this rank's own share, as it will be once entries are selected, also while the tensor is sent dense.
            keeps_error: whether what the codec of small tensors loses is sent later.
        """
        self._keeps_error = keeps_error
        self._bucket = bucket
        self._own_share = own_share
        self._kernels = kernels
        self.values = np.empty(0, bucket.dtype)
        self._places: list[np.ndarray] = []  # of the segments, in the vector
        self._left = np.zeros(bucket.small_size, np.float32)
        self._changes = False

    def start(self, plan: BucketPlan) -> None:
        """Begin a step; where its plan is another than before, have memory for it once nothing uses the old one."""
        self._changes = False
        if plan is self._plan:
            return
        self._wait()
        self._plan, self._first = plan, plan.vector_start
        if plan.vector_size and self.values.size != plan.vector_size:
            self.values = self._kernels.memory.host_array(plan.vector_size, self._bucket.dtype)
        self.segments = self._bucket.segments if plan.mode is Mode.DENSE else self._bucket.dense
        self._places = [self.values[s.offset - self._first :][: s.length] for s in self.segments]

    def _wait(self) -> None:
        """Wait until nothing works on the bucket's host buffers any more."""

    def begin(self, step: StepContext, plan: BucketPlan) -> None:
        """Let a device begin with :meth:`pack`."""

    def pack(self, step: StepContext, plan: BucketPlan) -> bool:
        """Copy the dense tensors' gradients into the vector; returns whether one is not finite."""
        if plan.vector_size == 0:
            return False
        vector = self.values
        # In a dense sum of selected entries, the sparsified part is filled already; padding must be 0 elsewhere.
        vector[0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - self._first :] = 0
        for segment, place in zip(self.segments, self._places, strict=True):
            gradient, scale = step.submissions[segment.parameter].gradient, step.scales[segment.parameter]
            if scale == 1.0:
                place[...] = gradient
            else:
                np.multiply(gradient, vector.dtype.type(scale), out=place, dtype=vector.dtype)
        return not is_finite(vector)

    def code_small(self, plan: BucketPlan, state: BucketState, coded: np.ndarray) -> bool:
        """Add to small tensors' gradients their residuals, and code them where the plan says so.

        The state does not change before :meth:`commit`: a step that is refused or fails leaves it as it was.

        Args:
            plan: of this step; the vector is packed.
            state: of the bucket.
            coded: (plan.coded_bytes,) uint8 of the message.

        Returns:
            Whether a sum is not finite; the message then holds zeros in their place.
        """
        if not (state.residual_pending or plan.small):
            return False
        self._changes = True
        first = self._bucket.sparse_size - self._first
        x = self.values[first : first + self._bucket.small_size]
        if state.residual_pending:
            with np.errstate(over="ignore", invalid="ignore"):
                x += state.error
        finite = is_finite(x)
        if plan.small and finite:
            plan.small.encode(x, coded, self._left)
        else:
            coded.fill(0)
        if not (plan.small and self._keeps_error):
            self._left.fill(0)
        return not finite

    def commit(self, plan: BucketPlan, state: BucketState) -> None:
        """The step counts: what its codec has lost becomes their residual."""
        if self._changes:
            state.error[...] = self._left
            state.residual_pending = plan.small is not None

    def add(self, plan: BucketPlan, messages: Sequence[Incoming]) -> None:
        """Become the sum of what came inside the messages; the rest stays.

        Raises:
            WireError: a message is damaged; names its sender.
        """
        if plan.small:
            small = self.values[: plan.plain_start]
            small.fill(0)
            for message in messages:
                try:
                    plan.small.add(message.coded, small)
                except WireError as error:
                    raise message.damaged(error) from error
        if plan.inline and plan.inline_bytes:
            plain = self.values[plan.plain_start :]
            plain.fill(0)
            for message in messages:
                plain += message.inline.view(plain.dtype)

    def average(self, share: float, plan: BucketPlan) -> bool:
        """Multiply the sum by 1 / P, or by 1; returns whether it is finite."""
        values = self.values
        if share != 1.0:
            values *= values.dtype.type(share)
        finite = is_finite(values)
        if plan.mode is Mode.DENSE and self._own_share != 1.0:
            values[: self._bucket.sparse_size] *= values.dtype.type(self._own_share)
        return finite

    def share_of(self, segment: Segment) -> float:
        """What part of a tensor's result its place in the vector holds."""
        return self._own_share if segment.offset < self._bucket.sparse_size else 1.0

    def write_sum(self, step: StepContext) -> None:
        """Write the results of sparsified tensors whose entries were summed densely."""
        for segment in self._bucket.sparse:
            np.multiply(self.values[segment.slice], step.loss_scale, out=step.submissions[segment.parameter].result)

    def write(self, step: StepContext, u: Array, *, refused: bool) -> None:
        """Write the results of dense tensors: momentum SGD on the mean; in a refused step the mean itself."""
        items = step.submissions.of(self.segments)
        if refused:
            for segment, place, item in zip(self.segments, self._places, items, strict=True):
                np.multiply(place, step.loss_scale / self.share_of(segment), out=item.result)
            return
        for first, stop in self._runs(step.hyper):
            segments, run = self.segments[first:stop], items[first:stop]
            if stop - first == 1:
                self._update(step, segments[0], run[0].parameter, run[0].result, u[segments[0].slice])
                continue
            # One update for neighbours with the same options: a call for each would cost more than its work.
            start = segments[0].offset
            whole = Segment(segments[0].parameter, start, segments[-1].slice.stop - start)
            results, parameters = np.empty(whole.length, self.values.dtype), None
            if step.hyper.weight_decay[whole.parameter]:
                parameters = np.zeros(whole.length, self.values.dtype)
                for segment, item in zip(segments, run, strict=True):
                    parameters[segment.offset - start :][: segment.length] = item.parameter
            self._update(step, whole, parameters, results, u[whole.slice])
            for segment, item in zip(segments, run, strict=True):
                item.result[...] = results[segment.offset - start :][: segment.length]

    def overflows(self, step: StepContext, u: Array) -> Callable[[], bool]:
        """Ask whether a result will not fit the narrower type it is cast to (the same answer on every rank).

        What comes back answers: once all buckets have been asked, a device is waited for once.
        """
        return partial(self._overflows, step, u)

    def _overflows(self, step: StepContext, u: np.ndarray) -> bool:
        dense = set(self.segments)
        for segment in self._bucket.segments:
            item = step.submissions[segment.parameter]
            if item.limit is None or segment.length == 0:
                continue
            result = item.result
            if segment in dense:
                result = np.empty_like(result)
                self._update(step, segment, item.parameter, result, u[segment.slice].copy())
            if not np.abs(result).max() <= item.limit:
                return True
        return False

    def _runs(self, hyper: Hyper) -> list[tuple[int, int]]:
        """Ranges of neighbours that are small and share their options; each larger one by itself."""
        starts: list[int] = []
        before = None
        for i, segment in enumerate(self.segments):
            p, options = segment.parameter, None
            if segment.length <= SMALL:
                sparsified = segment.offset < self._bucket.sparse_size
                options = hyper.momentum[p], hyper.nesterov[p], hyper.weight_decay[p], sparsified
            if options is None or options != before:
                starts.append(i)
            before = options
        return list(zip(starts, [*starts[1:], len(self.segments)], strict=False))

    def _update(
        self, step: StepContext, segment: Segment, parameter: np.ndarray | None, result: np.ndarray, u: np.ndarray
    ) -> None:
        hyper, i, share = step.hyper, segment.parameter, self.share_of(segment)
        mean = self.values[segment.offset - self._first :][: segment.length]
        rule = MomentumRule(
            hyper.momentum[i], hyper.nesterov[i], hyper.weight_decay[i] * share, step.loss_scale / share
        )
        self._kernels.dense_update(result, mean, u, parameter, rule)


class DeviceVector(DenseVector):
    """The vector of a bucket whose tensors are on a device: one pass in, one pass out."""

    _kernels: DeviceKernels
    _packing: tuple[StepContext, Callable[[], bool]] | None = None

    def _wait(self) -> None:
        self._kernels.wait()

    def begin(self, step: StepContext, plan: BucketPlan) -> None:  # noqa: D102
        self.start(plan)
        # In a dense sum of selected entries, the encoder fills the sparsified part.
        first = 0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - self._first
        if plan.vector_size > first:
            parts = [
                Part(
                    s.offset - self._first - first, s.length, step.submissions[s.parameter].gradient,
                    scale=step.scales[s.parameter],
                )
                for s in self.segments
            ]  # fmt: skip
            self._packing = step, self._kernels.begin_packing(parts, self.values[first:])

    def pack(self, step: StepContext, plan: BucketPlan) -> bool:  # noqa: D102
        if self._packing is None or self._packing[0] is not step:
            self.begin(step, plan)
        packing, self._packing = self._packing, None
        return packing is not None and packing[1]()

    def write_sum(self, step: StepContext) -> None:  # noqa: D102
        items = zip(self._bucket.sparse, step.submissions.of(self._bucket.sparse), strict=True)
        parts = [Part(s.offset, s.length, scale=step.loss_scale, result=item.result) for s, item in items]
        self._kernels.update(parts, self.values)

    def write(self, step: StepContext, u: Array, *, refused: bool) -> None:  # noqa: D102
        self._kernels.update(self._updates(step, refused=refused), self.values, u[self._first :])

    def overflows(self, step: StepContext, u: Array) -> Callable[[], bool]:  # noqa: D102
        parts = [p for p in self._updates(step, refused=False) if p.limit is not None]
        written = []
        if self._plan is not None and self._plan.mode is not Mode.DENSE:
            items = zip(self._bucket.sparse, step.submissions.of(self._bucket.sparse), strict=True)
            written = [
                Part(s.offset, s.length, result=i.result, limit=i.limit) for s, i in items if i.limit is not None
            ]
        return self._kernels.exceeds(parts, self.values, u[self._first :], written)

    def _updates(self, step: StepContext, *, refused: bool) -> list[Part]:
        """The dense tensors' way out of the vector; in a refused step without momentum and weight decay."""
        hyper, parts = step.hyper, []
        for s in self.segments:
            i, item, share = s.parameter, step.submissions[s.parameter], self.share_of(s)
            part = Part(
                s.offset - self._first, s.length, scale=step.loss_scale / share, result=item.result, limit=item.limit
            )
            if not refused:
                part.parameter, part.weight_decay = item.parameter, hyper.weight_decay[i] * share
                part.momentum, part.nesterov = hyper.momentum[i], hyper.nesterov[i]
            parts.append(part)
        return parts
