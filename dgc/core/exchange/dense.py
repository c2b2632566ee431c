"""A bucket's dense sum: of dense tensors; in dense steps, or if this takes fewer bytes, of all tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Array, Kernels, SegmentWork, is_finite
from dgc.core.layout import Bucket, Segment
from dgc.core.message import BucketPlan, Incoming, Mode
from dgc.core.state import BucketState
from dgc.errors import WireError


class DenseVector:
    """One bucket's vector on the host. It holds gradients, then their sum over the ranks. Results are made from this.

    Attributes:
        values: (plan.vector_size,) float32; float64 in float64 buckets.
        segments: the tensors that are sent dense in this step.
    """

    segments: tuple[Segment, ...] = ()
    _plan: BucketPlan
    _dense: np.ndarray  # the part of the vector for these segments
    _origin = 0  # the place of that part in the bucket
    _parts: Sequence[SegmentWork] = ()

    def __init__(self, bucket: Bucket, kernels: Kernels, own_share: float = 1.0, keeps_error: bool = True) -> None:
        """Allocate nothing yet; the first plan that needs memory allocates it.

        Args:
            bucket: the bucket.
            kernels: the kernels whose memory holds u.
            own_share: see :meth:`dgc.core.config.DGCConfig.own_share`.
            keeps_error: whether the small tensors' coding error is kept and sent later.
        """
        self._bucket, self._kernels = bucket, kernels
        self._own_share, self._keeps_error = own_share, keeps_error
        self.values = np.empty(0, bucket.dtype)
        self._lost = np.zeros(bucket.small_size, np.float32)
        self._has_coded = False

    def start(self, plan: BucketPlan) -> None:
        """Begin a step; allocate memory if the plan has changed."""
        self._has_coded = False
        if plan is getattr(self, "_plan", None):
            return
        self._kernels.wait()  # a device may still use the memory
        self._plan = plan
        if plan.vector_size and self.values.size != plan.vector_size:
            self.values = self._kernels.memory.host_array(plan.vector_size, self._bucket.dtype)
        self.segments, self._origin = self._bucket.segments, 0
        if plan.mode is not Mode.DENSE:  # the part for sparsified tensors, if there is one, is filled by the bucket
            self.segments, self._origin = self._bucket.dense, self._bucket.sparse_size
        self._dense = self.values[self._origin - plan.vector_start :]
        self._parts = [
            SegmentWork(offset=first, length=s.length, place=self._dense[first : first + s.length])
            for s in self.segments
            for first in (s.offset - self._origin,)
        ]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin_packing(self, step: Step) -> Callable[[], bool]:
        """Begin to copy the gradients of dense tensors into the vector.

        Returns:
            A function that waits for the copies and returns whether a value is not finite.
        """
        submissions, scales = step.submissions, step.scales
        for s, part in zip(self.segments, self._parts, strict=True):
            part.gradient, part.scale = submissions[s.parameter].gradient, scales[s.parameter]
        return self._kernels.begin_packing(self._parts, self._dense) if self._parts else lambda: False

    def code_small(self, state: BucketState, blocks: Sequence[np.ndarray]) -> bool:
        """Add residuals to small tensors' gradients, and code these if the plan says so; return whether all are finite.

        The residuals change only in :meth:`commit`, so a step that is refused or fails does not change them.

        Args:
            state: the bucket's state.
            blocks: for each of the plan's ``small_codecs``, the bytes for its block.
        """
        codecs = self._plan.small_codecs
        if not (state.residual_pending or codecs):
            return True
        self._has_coded = True
        first = self._bucket.sparse_size - self._origin
        x = self._dense[first : first + self._bucket.small_size]
        if state.residual_pending:
            x += state.error
        finite = is_finite(x)
        for codec, block in zip(codecs, blocks, strict=True):
            if finite:
                codec.encode(x, block, self._lost)
            else:
                block.fill(0)
        if not (codecs and finite and self._keeps_error):
            self._lost.fill(0)
        return finite

    @property
    def plain(self) -> np.ndarray:
        """The part of the vector that is not coded."""
        return self.values[self._plan.plain_start :]

    # -- the sum -----------------------------------------------------------------------------------------------------

    def add(self, messages: Sequence[Incoming]) -> None:
        """Replace the parts that were sent inside messages by their sum over the ranks."""
        if codecs := self._plan.small_codecs:
            small = self.values[: self._plan.plain_start]
            small.fill(0)
            for message in messages:
                try:
                    codecs[message.sender if self._plan.dealing else 0].add(message.coded, small)
                except WireError as error:
                    raise message.damaged(error) from error
        if self._plan.inline_bytes:
            plain = self.plain
            plain.fill(0)
            for message in messages:
                plain += message.inline.view(plain.dtype)

    def average(self, factor: float) -> bool:
        """Multiply the sum by ``factor``; return whether it is finite."""
        values = self.values
        if factor != 1.0:
            values *= values.dtype.type(factor)
        finite = is_finite(values)
        if self._plan.mode is Mode.DENSE and self._own_share != 1.0:
            values[: self._bucket.sparse_size] *= values.dtype.type(self._own_share)
        return finite

    # -- results -----------------------------------------------------------------------------------------------------

    def commit(self, state: BucketState) -> None:
        """Store the small tensors' coding error as their residual."""
        if self._has_coded:
            state.error[...] = self._lost
            state.residual_pending = self._plan.small is not None

    def write_selected(self, step: Step) -> None:
        """Write the results of sparsified tensors whose entries were summed densely."""
        results = step.submissions.results(self._bucket.sparse)
        parts = [
            SegmentWork(offset=s.offset, length=s.length, scale=step.loss_scale, result=result)
            for s, result in zip(self._bucket.sparse, results, strict=True)
        ]
        self._kernels.update(parts, self.values)

    def write(self, step: Step, u: Array, *, refused: bool) -> None:
        """Write the results of dense tensors: the mean with momentum applied, or in a refused step only the mean."""
        self._prepare_update(step, refused=refused)
        self._kernels.update(self._parts, self._dense, u[self._origin :])

    def overflows(self, step: Step, u: Array) -> bool:
        """Return whether a result is too large for the narrower type that it is cast to; the same on every rank."""
        self._prepare_update(step, refused=False)
        others = self._bucket.sparse if self._plan.mode is not Mode.DENSE else ()
        written = [
            SegmentWork(offset=s.offset, length=s.length, result=i.result, limit=i.limit)
            for s, i in zip(others, step.submissions.of(others), strict=True)
            if i.limit is not None
        ]
        limited = [p for p in self._parts if p.limit is not None]
        return self._kernels.exceeds(limited, self._dense, u[self._origin :], written)

    def release(self) -> None:
        """Drop the references to the step's arrays."""
        for part in self._parts:
            part.gradient = part.parameter = part.result = None

    def _prepare_update(self, step: Step, *, refused: bool) -> None:
        hyper, submissions = step.hyper, step.submissions
        for s, part in zip(self.segments, self._parts, strict=True):
            i, share = s.parameter, 1.0
            if s.offset < self._bucket.sparse_size:
                share = self._own_share  # average() has multiplied a sparsified tensor's sum by it
            item = submissions[i]
            part.gradient, part.parameter, part.result, part.limit = None, item.parameter, item.result, item.limit
            part.scale = step.loss_scale / share
            part.momentum, part.nesterov, part.weight_decay = 0.0, False, 0.0
            if not refused:
                part.momentum, part.nesterov = hyper.momentum[i], hyper.nesterov[i]
                part.weight_decay = hyper.weight_decay[i] * share
