"""A plain and slow NumPy backend. Tests compare the fast backends with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from typing_extensions import override

from dgc.core.kernels.base import Array, Kernels, MomentumRule, SegmentWork, Selection, bounds_in_results


def top_k(values: np.ndarray, k: int) -> np.ndarray:
    """Return the ascending positions, int64, of the k largest non-zero ``|values|``, or of all if there are fewer.

    Among equal magnitudes, lower positions go first. ``values`` are (n,) finite floats.
    """
    magnitude = np.abs(values)
    n = magnitude.size
    if k >= n:
        return np.flatnonzero(magnitude)
    if k == 0:
        return np.empty(0, np.int64)
    kth = np.partition(magnitude, n - k)[n - k]
    above = np.flatnonzero(magnitude > kth)
    if kth == 0:
        return above
    ties = np.flatnonzero(magnitude == kth)[: k - above.size]
    return np.sort(np.concatenate([above, ties]))


class ReferenceKernels(Kernels):
    """See :class:`dgc.core.kernels.base.Kernels`. Every operation makes temporary arrays of size n."""

    name = "reference"

    @override
    def describe(self) -> str:
        return f"numpy {np.__version__}, 1 thread"

    @override
    def sums_of_squares(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        out = np.empty(len(gradients))
        for i, gradient in enumerate(gradients):
            g = as_float(gradient, np.dtype(np.float64))
            g[~np.isfinite(g)] = 0
            out[i] = np.dot(g, g)
        return out

    @override
    def accumulate(self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray) -> bool:
        nonfinite = False
        for w in work:
            span = slice(w.offset, w.offset + w.length)
            g = effective_gradient(w, u.dtype)
            bad = ~np.isfinite(g)
            if bad.any():
                nonfinite = True
                g[bad] = 0
            m = u.dtype.type(w.momentum)
            with np.errstate(over="ignore", invalid="ignore"):
                velocity = m * u[span] + g if w.momentum else g
                sums = v[span] + (g + m * velocity if w.nesterov and w.momentum else velocity)
            # Where a sum of finite values is infinite, u and v keep their values.
            fits = np.isfinite(sums)
            nonfinite |= not fits.all()
            if w.momentum:
                np.copyto(u[span], velocity, where=fits)
            np.copyto(v[span], sums, where=fits)
        return nonfinite

    @override
    def begin_selection(
        self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, thresholds: np.ndarray | None
    ) -> Callable[[], Selection]:
        return partial(self.accumulate_and_select, work, u, v, thresholds)

    @override
    def accumulate_and_select(
        self, work: Sequence[SegmentWork], u: np.ndarray, v: np.ndarray, thresholds: np.ndarray | None
    ) -> Selection:
        nonfinite = self.accumulate(work, u, v)
        chosen = [w.offset + top_k(v[w.offset : w.offset + w.length], w.k) for w in work]
        positions = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        return Selection(positions, nonfinite, v[positions])

    @override
    def take_out(self, u: Array, v: Array, positions: np.ndarray, decoded: np.ndarray, *, masking: bool) -> None:
        v[positions] = v[positions] - decoded
        if masking:
            u[positions] = 0

    @override
    def set_entries(
        self, results: Sequence[Array], offsets: np.ndarray, positions: np.ndarray, values: np.ndarray
    ) -> None:
        bounds = bounds_in_results(results, offsets, positions)
        for s, result in enumerate(results):
            inside = slice(bounds[s], bounds[s + 1])
            result.fill(0)
            result[positions[inside] - offsets[s]] = values[inside]

    @override
    def dense_update(
        self, result: Array, mean: np.ndarray, u: Array, parameter: Array | None, rule: MomentumRule
    ) -> None:
        g = mean
        if rule.weight_decay and parameter is not None:
            g = mean + as_float(parameter, mean.dtype) * mean.dtype.type(rule.weight_decay)
        if rule.momentum:
            m = mean.dtype.type(rule.momentum)
            u *= m
            u += g
            g = g + m * u if rule.nesterov else u
        if rule.scale == 1:
            result[...] = g
        else:
            np.multiply(g, mean.dtype.type(rule.scale), out=result)


def effective_gradient(work: SegmentWork, dtype: np.dtype) -> np.ndarray:
    """Return ``G = gradient * scale + weight_decay * parameter``, (length,), in the state's type."""
    g = as_float(work.gradient, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        if work.scale != 1:
            g *= dtype.type(work.scale)
        if work.weight_decay and work.parameter is not None:
            g += as_float(work.parameter, dtype) * dtype.type(work.weight_decay)
    return g


def as_float(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a copy of ``array`` in ``dtype``; uint16 are the bits of bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(dtype)
