"""What is summed densely in a bucket: dense tensors in every step, and all tensors where a dense sum is cheaper.

The *vector* of a step covers positions ``plan.vector_start`` to ``bucket.size``. It goes into the message or through an
allreduce; afterwards it holds the mean (or sum) over the ranks. Small tensors may go into the message coded; what their
codec loses is added to their gradients in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from dgc.core.exchange.encoders.finite import is_finite
from dgc.core.exchange.records import StepContext, Submission
from dgc.core.kernels.base import Kernels, MomentumRule
from dgc.core.state.layout import Bucket, Segment
from dgc.core.state.state import BucketState
from dgc.core.wire.message import Incoming, blaming
from dgc.core.wire.plan import BucketPlan, Mode

SMALL = 4096
"""Elements up to which tensors are updated together: a copy of that many takes less time than a call."""


class DenseVector:
    """The vector of one bucket, on the host, with its way in and its way out."""

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
        self._memory = kernels.memory
        self.values = np.empty(0, bucket.dtype)
        """(plan.vector_size,) float32, float64 in float64 buckets."""
        self._left = np.zeros(bucket.small_size, np.float32)
        self._changes = False

    def start(self, plan: BucketPlan) -> None:
        """Have memory for the plan."""
        self._changes = False
        if plan.vector_size and self.values.size != plan.vector_size:
            self.values = self._memory.host_array(plan.vector_size, self._bucket.dtype)

    def wait_for_buffers(self) -> None:
        """Wait until nothing works on the bucket's host buffers any more; they are about to be replaced."""

    def pack(self, step: StepContext, plan: BucketPlan) -> bool:
        """Copy the dense tensors' gradients into the vector; returns whether one is not finite."""
        if plan.vector_size == 0:
            return False
        vector, start = self.values, plan.vector_start
        # In a dense sum of selected entries, the sparsified part is filled already; padding must be 0 elsewhere.
        vector[0 if plan.mode is Mode.DENSE else self._bucket.sparse_size - start :] = 0
        segments = self.segments(plan)
        for segment, item in zip(segments, step.submissions.of(segments), strict=True):
            place = vector[segment.offset - start : segment.offset - start + segment.length]
            scale = step.gradient_scale(segment.parameter)
            if scale == 1.0:
                place[...] = item.gradient
            else:
                np.multiply(item.gradient, vector.dtype.type(scale), out=place, dtype=vector.dtype)
        return not is_finite(vector)

    def code_small(self, plan: BucketPlan, state: BucketState, coded: np.ndarray) -> bool:
        """Add to small tensors' gradients what is owed to them, and code them where the plan says so.

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
        first = self._bucket.sparse_size - plan.vector_start
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
        """The step counts: what its codec has lost is owed from now on."""
        if self._changes:
            state.error[...] = self._left
            state.residual_pending = plan.small is not None

    def add(self, plan: BucketPlan, messages: Sequence[Incoming]) -> None:
        """Become the sum of what came inside the messages; the rest stays.

        Raises:
            WireError: a message is damaged; names its sender.
        """
        plain = self.values[plan.plain_start :]
        if plan.small:
            small = self.values[: plan.plain_start]
            small.fill(0)
            for message in messages:
                with blaming(message.who, self._bucket.index):
                    plan.small.add(message.coded, small)
        if plan.inline and plain.size:
            plain.fill(0)
            for message in messages:
                plain += message.inline.view(plain.dtype)

    def average(self, share: float, plan: BucketPlan) -> bool:
        """Multiply the sum by 1 / P, or by 1; returns whether it is finite."""
        if share != 1.0:
            self.values *= self.values.dtype.type(share)
        finite = is_finite(self.values)
        if plan.mode is Mode.DENSE and self._own_share != 1.0:
            self.values[: self._bucket.sparse_size] *= self.values.dtype.type(self._own_share)
        return finite

    def share_of(self, segment: Segment) -> float:
        """What part of a tensor's result its place in the vector holds."""
        return self._own_share if segment.offset < self._bucket.sparse_size else 1.0

    def write_sum(self, step: StepContext, plan: BucketPlan) -> None:
        """Write the results of sparsified tensors whose entries were summed densely."""
        for segment, item in zip(self._bucket.sparse, step.submissions.of(self._bucket.sparse), strict=True):
            np.multiply(self.values[segment.slice], step.loss_scale, out=item.result)

    def write(self, step: StepContext, plan: BucketPlan, u: np.ndarray, *, refused: bool) -> None:
        """Write the results of dense tensors: momentum SGD on the mean; in a refused step the mean itself."""
        segments = self.segments(plan)
        items = step.submissions.of(segments)
        if refused:
            for segment, item in zip(segments, items, strict=True):
                np.multiply(self._mean_of(plan, segment), step.loss_scale / self.share_of(segment), out=item.result)
            return
        for first, stop in self._runs(segments, step):
            if stop - first > 1:
                self._update_run(step, plan, segments[first:stop], items[first:stop], u)
            else:
                segment, item = segments[first], items[first]
                self._update(step, plan, segment, item, item.result, u[segment.slice])

    def overflows(self, step: StepContext, plan: BucketPlan, u: np.ndarray) -> Callable[[], bool]:
        """Ask whether a result will not fit the narrower type it is cast to; see :meth:`BucketExchange.overflows`."""
        return partial(self._overflows, step, plan, u)

    def _overflows(self, step: StepContext, plan: BucketPlan, u: np.ndarray) -> bool:
        dense = set(self.segments(plan))
        for segment in self._bucket.segments:
            item = step.submissions[segment.parameter]
            if item.limit is None or segment.length == 0:
                continue
            if segment in dense:
                result = np.empty_like(item.result)
                self._update(step, plan, segment, item, result, u[segment.slice].copy())
            else:
                result = item.result
            if not np.abs(result).max() <= item.limit:
                return True
        return False

    def segments(self, plan: BucketPlan) -> tuple[Segment, ...]:
        """Those that are sent dense in this step."""
        return self._bucket.segments if plan.mode is Mode.DENSE else self._bucket.dense

    def _mean_of(self, plan: BucketPlan, segment: Segment) -> np.ndarray:
        start = segment.offset - plan.vector_start
        return self.values[start : start + segment.length]

    def _update_run(
        self,
        step: StepContext,
        plan: BucketPlan,
        segments: Sequence[Segment],
        items: Sequence[Submission],
        u: np.ndarray,
    ) -> None:
        """One update for neighbours with the same options: a call for each would cost more than its work."""
        whole = Segment(segments[0].parameter, segments[0].offset, segments[-1].slice.stop - segments[0].offset)
        results = np.empty(whole.length, self.values.dtype)
        parameters = None
        if step.hyper.weight_decay[whole.parameter]:
            parameters = np.zeros(whole.length, self.values.dtype)
            for segment, item in zip(segments, items, strict=True):
                start = segment.offset - whole.offset
                parameters[start : start + segment.length] = item.parameter
        self._update(step, plan, whole, Submission(results, results, parameters), results, u[whole.slice])
        for segment, item in zip(segments, items, strict=True):
            start = segment.offset - whole.offset
            item.result[...] = results[start : start + segment.length]

    def _runs(self, segments: Sequence[Segment], step: StepContext) -> Iterator[tuple[int, int]]:
        """Ranges of neighbours that are small and share their options; each larger one by itself."""
        hyper, first, before = step.hyper, 0, None
        for i, segment in enumerate(segments):
            p = segment.parameter
            options = None
            if segment.length <= SMALL:
                options = hyper.momentum[p], hyper.nesterov[p], hyper.weight_decay[p], self.share_of(segment)
            if i and (options is None or options != before):
                yield first, i
                first = i
            before = options
        if segments:
            yield first, len(segments)

    def _update(
        self,
        step: StepContext,
        plan: BucketPlan,
        segment: Segment,
        item: Submission,
        result: np.ndarray,
        u: np.ndarray,
    ) -> None:
        hyper, i = step.hyper, segment.parameter
        share = self.share_of(segment)
        rule = MomentumRule(
            hyper.momentum[i], hyper.nesterov[i], hyper.weight_decay[i] * share, step.loss_scale / share
        )
        self._kernels.dense_update(result, self._mean_of(plan, segment), u, item.parameter, rule)
