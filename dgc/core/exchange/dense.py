"""The tensors of a bucket that are sent dense in a step: their gradients, their sum over the ranks, their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.codecs import SmallCodec
from dgc.core.exchange.sizes import Setting, fits_inside
from dgc.core.exchange.step import Step
from dgc.core.kernels.base import Array, Kernels, SegmentWork, is_finite
from dgc.core.state import BucketState


class DenseVector:
    """One bucket's vector on the host. It holds gradients, then their sum over the ranks. Results are made from this.

    It covers the bucket from a position on. Its first elements may be small tensors that are sent coded; the rest, the
    *plain* part, is sent inside the message if that saves a collective, else by allreduce.

    Attributes:
        size: elements.
        values: (size,) float32; float64 in float64 buckets.
        segments: the tensors that are sent dense.
        plain_bytes: bytes of the plain part.
        is_inline: whether it is sent inside the message; ``inline_bytes`` are its bytes there.
    """

    _kernels: Kernels
    _dense: np.ndarray  # the part of the vector for the segments
    _parts: Sequence[SegmentWork] = ()

    def __init__(self, setting: Setting, *, start: int, origin: int, is_coded: bool = False) -> None:
        """Decide the sizes. Let S be the place in the bucket behind the sparsified tensors.

        ==========  ============  ============================================
        ``start``   ``origin``    the vector holds
        ==========  ============  ============================================
        0           0             all gradients: a step without compression
        0           S             selected entries between zeros, then the rest
        S           S             the rest: small tensors, and excluded ones
        ==========  ============  ============================================

        Args:
            setting: the bucket, and what sizes follow from.
            start: where the vector begins in the bucket.
            origin: where the tensors begin whose gradients are sent as they are.
            is_coded: whether small tensors are sent coded.
        """
        bucket, config, _, ranks, _ = setting
        self._bucket, self._start, self._origin = bucket, start, origin
        self._own_share, self._keeps_error = config.own_share(ranks), config.keeps_residual
        self.segments = bucket.dense if origin else bucket.segments
        self.size, self.itemsize = bucket.size - start, np.dtype(bucket.dtype).itemsize
        self._coded = bucket.small_size if is_coded else 0
        self.plain_bytes = (self.size - self._coded) * self.itemsize
        self.is_inline = fits_inside(self.plain_bytes, self.plain_bytes, ranks)
        self.inline_bytes = self.plain_bytes if self.is_inline else 0
        self._has_error = False

    def allocate(self, kernels: Kernels) -> None:
        """Allocate the memory."""
        self._kernels = kernels
        self.values = kernels.memory.host_array(self.size, self._bucket.dtype)
        self._lost = np.zeros(self._bucket.small_size, np.float32)
        self._dense = self.values[self._origin - self._start :]
        self._parts = [
            SegmentWork(offset=first, length=s.length, place=self._dense[first : first + s.length])
            for s in self.segments
            for first in (s.offset - self._origin,)
        ]

    def free(self) -> None:
        """Free the memory."""
        self._parts = ()
        del self.values, self._dense, self._lost

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

    def code_small(self, state: BucketState, codecs: Sequence[SmallCodec], blocks: Sequence[np.ndarray]) -> bool:
        """Add residuals to small tensors' gradients, and write these with each codec; return whether all are finite.

        The residuals change only in :meth:`commit`, so a step that is refused or fails does not change them.
        """
        self._has_error = bool(state.residual_pending or codecs)
        if not self._has_error:
            return True
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
    def small(self) -> np.ndarray:
        """The part of the vector that is sent coded."""
        return self.values[: self._coded]

    @property
    def plain(self) -> np.ndarray:
        """The part of the vector that is not coded."""
        return self.values[self._coded :]

    # -- the sum -----------------------------------------------------------------------------------------------------

    def add_plain(self, blocks: Sequence[np.ndarray]) -> None:
        """Replace the plain part by the sum of all ranks' plain parts, which came as bytes."""
        plain = self.plain
        plain.fill(0)
        for block in blocks:
            plain += block.view(plain.dtype)

    def average(self, factor: float) -> bool:
        """Multiply the sum by ``factor``; return whether it is finite."""
        values = self.values
        if factor != 1.0:
            values *= values.dtype.type(factor)
        finite = is_finite(values)
        if not self._origin and self._own_share != 1.0:
            values[: self._bucket.sparse_size] *= values.dtype.type(self._own_share)
        return finite

    # -- results -----------------------------------------------------------------------------------------------------

    def commit(self, state: BucketState, *, is_coded: bool) -> None:
        """Store the small tensors' coding error as their residual."""
        if self._has_error:
            state.error[...] = self._lost
            state.residual_pending = is_coded

    def write(self, step: Step, u: Array, *, refused: bool) -> None:
        """Write the results of dense tensors: the mean with momentum applied, or in a refused step only the mean."""
        self._prepare_update(step, refused=refused)
        self._kernels.update(self._parts, self._dense, u[self._origin :])

    def overflows(self, step: Step, u: Array) -> bool:
        """Return whether a result is too large for the narrower type that it is cast to; the same on every rank."""
        self._prepare_update(step, refused=False)
        others = self._bucket.sparse if self._origin else ()
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
