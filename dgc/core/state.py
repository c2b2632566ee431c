"""The memory of a compressor on one rank: momentum buffers u, residuals v, and the step.

u and v differ between ranks once sparsification has begun, and must never be broadcast. :meth:`State.average` makes
them equal, to save them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.kernels.base import Array, Memory
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import Bucket, Layout, Segment
from dgc.core.saved import FORMAT, own_arrays, require_fit

# Users import these two from this module.
from dgc.core.state_file import load_state as load_state
from dgc.core.state_file import save_state as save_state
from dgc.core.stripes import Stripes


class BucketState:
    """The state of one bucket.

    Attributes:
        u: (size,), in the kernels' memory.
        v: (sparse_size,), in the kernels' memory.
        thresholds: (S, c) float64, which the selection updates.
        error: (small_size,) float32 on the host: the small tensors' coding error so far. If ``residual_pending``, the
            next step adds it to their gradients; otherwise it is 0.
        w: (n,) float32 on the host: the unsent part of the sums that this rank owns. n = 0 if ranks own no positions.
        owned_error: (small_size,) float32: the same for small tensors; 0 outside this rank's span. Empty if w is.
    """

    def __init__(self, bucket: Bucket, memory: Memory, stripes: Stripes | None) -> None:
        """Allocate zeros, and unknown thresholds. ``stripes`` are the positions that this rank owns, if any."""
        self._bucket, self._memory = bucket, memory
        self.u = self._memory.zeros(bucket.size, bucket.dtype)
        self.v = self._memory.zeros(bucket.sparse_size, bucket.dtype)
        self.thresholds = new_thresholds(len(bucket.sparse))
        self.error = np.zeros(bucket.small_size, np.float32)
        self.residual_pending = False
        self.stripes = stripes
        self.w = np.zeros(stripes.sparse_size if stripes else 0, np.float32)
        self.owned_error = np.zeros(bucket.small_size if stripes else 0, np.float32)

    def owned(self, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
        """Return a view of a tensor's unsent sums that this rank owns, (m,), and their places in the tensor, (m,)."""
        if self.stripes is None:
            return self.w, np.empty(0, np.int64)
        first = segment.offset - self._bucket.sparse_size
        if first < 0:
            places = self.stripes.slices[segment]
            return self.w[places], self.stripes.positions(np.arange(places.start, places.stop)) - segment.offset
        inside = np.arange(max(first, self.stripes.small.start), min(first + segment.length, self.stripes.small.stop))
        return self.owned_error[inside[0] : inside[-1] + 1] if inside.size else self.w[:0], inside - first

    def return_owned(self, *, sparse: bool, small: bool) -> None:
        """Move the unsent sums of sparsified and of small tensors into this rank's own residuals.

        Their total over all ranks stays the same.
        """
        if sparse and self.w.any():
            v = self._memory.to_host(self.v)
            for segment in self._bucket.sparse:
                owned, places = self.owned(segment)
                v[segment.slice][places] += owned
            self._memory.copy_in(self.v, v)
            self.w.fill(0)
        if small and self.owned_error.any():
            self.error += self.owned_error
            self.residual_pending = True
            self.owned_error.fill(0)

    def thresholds_of(self, segment: Segment) -> np.ndarray:
        """Return a view of the thresholds of a sparsified tensor, (c,)."""
        row: np.ndarray = self.thresholds[self._bucket.sparse.index(segment)]
        return row

    def error_of(self, segment: Segment) -> np.ndarray:
        """Return a view of a tensor's coding error: (length,), or (0,) if the tensor is never encoded."""
        first = segment.offset - self._bucket.sparse_size
        return self.error[first : first + segment.length] if first >= 0 else self.error[:0]

    def held(self, segment: Segment) -> list[Array]:
        """Return views of all arrays of a tensor."""
        held = [self.u[segment.slice], self.v[segment.slice], self.error_of(segment)]
        if segment.offset < self._bucket.sparse_size:
            held.append(self.thresholds_of(segment))
        return [*held, self.owned(segment)[0]]

    def copy(self) -> BucketState:
        """Return a copy."""
        other = BucketState(self._bucket, self._memory, self.stripes)
        other.assign(self)
        return other

    def assign(self, other: BucketState) -> None:
        """Copy the values of another state of the same sizes."""
        self._memory.copy(self.u, other.u)
        self._memory.copy(self.v, other.v)
        self.thresholds[...] = other.thresholds
        self.error[...] = other.error
        self.w[...], self.owned_error[...] = other.w, other.owned_error
        self.residual_pending = other.residual_pending

    def clear_error(self) -> None:
        """Set the small tensors' coding error and the unsent sums to 0."""
        self.error.fill(0)
        self.w.fill(0)
        self.owned_error.fill(0)
        self.residual_pending = False


class State:
    """All buckets' states and the step counter of one compressor on one rank.

    Attributes:
        own_share: see :meth:`dgc.core.config.DGCConfig.own_share`.
        is_equal: whether the state is known to be the same on all ranks.
    """

    def __init__(self, layout: Layout, memory: Memory, own_share: float, stripes: Sequence[Stripes | None]) -> None:
        """Start from zeros at step 0. ``stripes`` has each bucket's positions that this rank owns, if there are any."""
        self._layout, self._memory, self._stripes = layout, memory, stripes
        self.own_share = own_share
        self.reset()

    def reset(self) -> None:
        """Forget everything: zeros, step 0."""
        self.step, self.is_equal = 0, True
        self.buckets = [
            BucketState(bucket, self._memory, stripes)
            for bucket, stripes in zip(self._layout.buckets, self._stripes, strict=True)
        ]

    def copy(self) -> State:
        """Return a copy."""
        other = copy.copy(self)
        other.buckets = [bucket.copy() for bucket in self.buckets]
        return other

    def assign(self, other: State) -> None:
        """Copy the values of another state of the same layout."""
        for bucket, source in zip(self.buckets, other.buckets, strict=True):
            bucket.assign(source)
        self.step, self.is_equal = other.step, other.is_equal

    def momentum_buffer(self, parameter: int) -> Array:
        """Return a view of u for one parameter, (numel,), in the kernels' memory."""
        state, segment = self._place(parameter)
        return state.u[segment.slice]

    def residual(self, parameter: int) -> Array:
        """Return a view of v for one parameter: (numel,), or (0,) for a parameter that is sent dense."""
        state, segment = self._place(parameter)
        return state.v[segment.slice]

    def error(self, parameter: int) -> np.ndarray:
        """Return a view of a small tensor's coding error: (numel,), or (0,) if the tensor is never encoded."""
        state, segment = self._place(parameter)
        return state.error_of(segment)

    def shared_momentum(self, rampup_begin_step: int) -> dict[int, np.ndarray]:
        """Return copies of u, by parameter, of all parameters whose u is equal on all ranks."""
        entries, is_shared = self.to_dict()["parameters"].values(), self.step <= rampup_begin_step
        return {i: entry["u"] for i, entry in enumerate(entries) if "u" not in own_arrays(entry, is_shared)}

    def set_momentum_buffer(self, parameter: int, values: np.ndarray) -> None:
        """Overwrite u of one parameter with (numel,) values."""
        self._memory.copy_in(self.momentum_buffer(parameter), values)

    def absorb_momentum(self, parameter: int, values: Any) -> None:
        """Set u of one parameter to this rank's share of the momentum buffer, (numel,), of a dense run."""
        share = self._share_of(parameter)
        self.set_momentum_buffer(parameter, values if share == 1.0 else values * values.dtype.type(share))

    def whole_momentum(self, parameter: int) -> np.ndarray:
        """Return a copy of u, (numel,), scaled from this rank's share to the whole momentum."""
        share = self._share_of(parameter)
        u = self._memory.to_host(self.momentum_buffer(parameter))
        return u if share == 1.0 else u / u.dtype.type(share)

    def residual_norm(self) -> float:
        """Return the L2 norm of all residuals of this rank, including those of small tensors."""
        squares = sum(self._memory.sum_of_squares(b.v) for b in self.buckets)
        others = [array for b in self.buckets for array in (b.error, b.w, b.owned_error)]
        return float(np.sqrt(squares + sum(float(np.square(a, dtype=np.float64).sum()) for a in others)))

    def average(self, transport: Transport, rampup_begin_step: int) -> int:
        """Make the state equal on all ranks: residuals and momentum become their means. Collective.

        Also forget the thresholds. The mean of the residuals, which the ranks have yet to send, stays the same.

        Returns:
            The number of bytes that this rank has sent.
        """
        sent = 0
        for bucket in self.buckets:
            bucket.return_owned(sparse=True, small=True)
            own = [bucket.v] if self.step < rampup_begin_step else [bucket.v, bucket.u[: len(bucket.v)]]
            for array in own:
                values = self._memory.to_host(array)
                sent += _average(values, transport)
                self._memory.copy_in(array, values)
            sent += _average(bucket.error, transport)
            bucket.residual_pending = bool(bucket.error.any())
            bucket.thresholds.fill(np.nan)
        self.is_equal = True
        return sent

    def to_dict(self) -> dict[str, Any]:
        """Return a copy as dicts and NumPy arrays. The keys are parameter names, because the layout may change.

        Sums that this rank owns are added to its own residuals.
        """
        parameters = {}
        for i, p in enumerate(self._layout.parameters):
            state, segment = self._place(i)
            entry: dict[str, Any] = {"u": self._memory.to_host(state.u[segment.slice])}
            owned, places = state.owned(segment)
            if self._layout.is_sparsified(i):
                entry["v"] = self._memory.to_host(state.v[segment.slice])
                entry["v"][places] += owned
                entry["threshold"] = state.thresholds_of(segment).copy()
            elif state.error_of(segment).size:
                error = state.error_of(segment).copy()
                error[places] += owned
                if error.any():
                    entry["error"] = error
            parameters[p.name] = entry
        return {"format": FORMAT, "step": self.step, "equal": self.is_equal, "parameters": parameters}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a sound result of :meth:`to_dict`.

        Raises:
            LayoutError: the parameters or their lengths differ, or a value is not finite. The state stays as it was.
        """
        require_fit(saved, self._layout)
        for bucket in self.buckets:
            bucket.clear_error()
        for i, p in enumerate(self._layout.parameters):
            entry, (state, segment) = saved["parameters"][p.name], self._place(i)
            self.set_momentum_buffer(i, entry["u"])
            if self._layout.is_sparsified(i):
                self._memory.copy_in(state.v[segment.slice], entry["v"])
                row, threshold = state.thresholds_of(segment), entry.get("threshold")
                row[...] = threshold if threshold is not None and len(threshold) == row.size else np.nan
            elif "error" in entry:
                state.error_of(segment)[...] = entry["error"]
                state.residual_pending = True
        self.step, self.is_equal = int(saved["step"]), bool(saved.get("equal"))

    def _place(self, parameter: int) -> tuple[BucketState, Segment]:
        bucket, segment = self._layout.places[parameter]
        return self.buckets[bucket], segment

    def _share_of(self, parameter: int) -> float:
        return self.own_share if self._layout.is_sparsified(parameter) else 1.0


def _average(values: np.ndarray, transport: Transport) -> int:
    """Replace values, (n,), by their mean over the ranks; return the number of bytes that this rank has sent."""
    if values.size:
        transport.allreduce(values, "sum")
        values /= transport.size
    return values.nbytes
