"""What a compressor remembers on one rank: momentum buffers u, residuals v, the step; and how to save them.

State is per rank: u and v differ between ranks once sparsification has begun, and must never be broadcast.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc.core.kernels.base import Array, Kernels
from dgc.core.state.checks import FORMAT, require_fit, require_sound
from dgc.core.state.layout import Layout, Segment


class BucketState:
    """u over the whole bucket, v over its sparsified part, the memory of the selection, and what small tensors lack.

    ``error`` is (small_size,) float32 on the host: what their codec has lost so far, which the next step adds to their
    gradients if ``residual_pending``; all zeros otherwise.
    """

    def __init__(
        self, size: int, sparse_size: int, segments: int, dtype: str, kernels: Kernels, small_size: int = 0
    ) -> None:
        """Allocate zeros: u (size,), v (sparse_size,), error, and ``segments`` unknown thresholds."""
        self._memory = memory = kernels.memory
        self.u = memory.zeros(size, dtype)
        self.v = memory.zeros(sparse_size, dtype)
        self.thresholds = kernels.new_thresholds(segments)
        self.error = np.zeros(small_size, np.float32)
        self.residual_pending = False

    def copy(self) -> BucketState:
        """Return the same values in memory of their own."""
        other = copy.copy(self)
        other.u, other.v = (self._memory.zeros(a.size, a.dtype) for a in (self.u, self.v))
        other.thresholds, other.error = np.empty_like(self.thresholds), np.empty_like(self.error)
        other.assign(self)
        return other

    def assign(self, other: BucketState) -> None:
        """Take over the values of another state of the same sizes."""
        self._memory.copy(self.u, other.u)
        self._memory.copy(self.v, other.v)
        self.thresholds[...] = other.thresholds
        self.error[...] = other.error
        self.residual_pending = other.residual_pending

    def clear_error(self) -> None:
        """Forget what the small tensors lack."""
        self.error.fill(0)
        self.residual_pending = False


class State:
    """All buckets' states and the step counter of one compressor on one rank."""

    def __init__(self, layout: Layout, kernels: Kernels) -> None:
        """Start from zeros at step 0."""
        self._layout = layout
        self._kernels = kernels
        self._memory = kernels.memory
        self.step = 0
        self.buckets: list[BucketState] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything: zeros, step 0."""
        self.step = 0
        self.buckets = [
            BucketState(b.size, b.sparse_size, len(b.sparse), b.dtype, self._kernels, b.small_size)
            for b in self._layout.buckets
        ]

    def copy(self) -> State:
        """Return the same values in memory of their own."""
        other = copy.copy(self)
        other.buckets = [bucket.copy() for bucket in self.buckets]
        return other

    def assign(self, other: State) -> None:
        """Take over the values of another state of the same layout."""
        for bucket, source in zip(self.buckets, other.buckets, strict=True):
            bucket.assign(source)
        self.step = other.step

    def momentum_buffer(self, parameter: int) -> Array:
        """View of u for one parameter, (numel,), where the kernels work."""
        bucket, segment = self._layout.places[parameter]
        return self.buckets[bucket].u[segment.slice]

    def shared_momentum(self, rampup_begin_step: int) -> dict[int, np.ndarray]:
        """Copies of u by parameter, of those where it is equal on all ranks."""
        entries, is_shared = self.to_dict()["parameters"].values(), self.step <= rampup_begin_step
        return {i: entry["u"] for i, entry in enumerate(entries) if "u" not in own_arrays(entry, is_shared)}

    def set_momentum_buffer(self, parameter: int, values: np.ndarray) -> None:
        """Overwrite u of one parameter with (numel,) values."""
        self._memory.copy_in(self.momentum_buffer(parameter), values)

    def absorb_momentum(self, parameter: int, values: Any, own_share: float) -> None:
        """Make the momentum buffer of a dense run, (numel,), u; where entries are selected, this rank's share of it."""
        share = own_share if self.residual(parameter).size else 1.0
        self.set_momentum_buffer(parameter, values if share == 1.0 else values * values.dtype.type(share))

    def residual(self, parameter: int) -> Array:
        """View of v for one parameter: (numel,), or (0,) for a parameter that is sent dense."""
        bucket, segment = self._layout.places[parameter]
        return self.buckets[bucket].v[segment.slice]

    def error(self, parameter: int) -> np.ndarray:
        """View of what a small tensor's codec has lost: (numel,), or (0,) for a parameter that is never sent coded."""
        bucket, segment = self._layout.places[parameter]
        first = segment.offset - self._layout.buckets[bucket].sparse_size
        return self.buckets[bucket].error[first : first + segment.length] if first >= 0 else np.empty(0, np.float32)

    def residual_norm(self) -> float:
        """L2 norm of all residuals of this rank, those of small tensors included."""
        squares = sum(self._memory.sum_of_squares(b.v) for b in self.buckets)
        return float(np.sqrt(squares + sum(float(np.square(b.error, dtype=np.float64).sum()) for b in self.buckets)))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy as plain containers of NumPy arrays, by parameter name (placement may change later)."""
        parameters = {}
        for i, p in enumerate(self._layout.parameters):
            entry: dict[str, Any] = {"u": self._memory.to_host(self.momentum_buffer(i))}
            if self._layout.is_sparsified(i):
                entry["v"] = self._memory.to_host(self.residual(i))
                entry["threshold"] = self._control_row(i).copy()
            elif i in self._layout.chosen:
                entry["exchange"] = "dense"
            elif self.buckets[self._layout.places[i][0]].residual_pending and self.error(i).size:
                entry["error"] = self.error(i).copy()
            parameters[p.name] = entry
        return {"format": FORMAT, "step": self.step, "parameters": parameters}

    def load(self, saved: dict[str, Any], own_share: float) -> None:
        """Take over what :meth:`to_dict` returned.

        A tensor that was sent dense by choice and is sparsified here begins as after a dense warm-up.

        Raises:
            LayoutError: another format, other parameters, other lengths, or values that are not finite; nothing is
                changed then.
        """
        require_sound(saved)
        require_fit(saved, self._layout.sparsified(), self._layout.lengths(), small=self._layout.small())
        for bucket in self.buckets:
            bucket.clear_error()
        for i, p in enumerate(self._layout.parameters):
            entry = saved["parameters"][p.name]
            if self._layout.is_sparsified(i) and "v" not in entry:
                self.absorb_momentum(i, np.asarray(entry["u"]), own_share)
                self._memory.fill(self.residual(i), 0)
                self._control_row(i)[...] = np.nan
                continue
            self.set_momentum_buffer(i, entry["u"])
            if self._layout.is_sparsified(i):
                self._memory.copy_in(self.residual(i), entry["v"])
                row = self._control_row(i)
                row[...] = np.nan
                threshold = entry.get("threshold")
                if threshold is not None and len(threshold) == row.size:
                    row[...] = threshold
            elif "error" in entry:
                self.error(i)[...] = entry["error"]
                self.buckets[self._layout.places[i][0]].residual_pending = True
        self.step = int(saved["step"])

    def _control_row(self, parameter: int) -> np.ndarray:
        bucket, segment = self._layout.places[parameter]
        segments: Sequence[Segment] = self._layout.buckets[bucket].sparse
        row: np.ndarray = self.buckets[bucket].thresholds[segments.index(segment)]
        return row


def own_arrays(entry: dict[str, Any], is_shared: bool) -> set[str]:
    """Names of a parameter's arrays that differ between ranks; u of a sparsified one not before the ramp-up (shared).

    Args:
        entry: of the parameter, in :meth:`State.to_dict`.
        is_shared: whether the ramp-up has not begun.
    """
    return set(entry) & ({"v", "error", "u"} if "v" in entry and not is_shared else {"v", "error"})


def resized(
    states: Sequence[dict[str, Any]], rank: int, size: int, rampup_begin_step: int, *, op: str = "average"
) -> dict[str, Any]:
    """Turn the states of N old ranks into this rank's state in a job of M ranks.

    Residuals (those of small tensors, too) and momentum buffers of the old ranks r with ``r % M == rank`` are summed
    and multiplied by M/N, which keeps their mean over the ranks; with ``op="sum"`` their sum is kept instead. What is
    equal on all ranks (everything before the ramp-up, the momentum buffer of dense tensors after it) is taken over as
    it is, with ``op="sum"`` a rank's share of a sparsified tensor's.

    Args:
        states: (N,) results of :meth:`State.to_dict` in rank order; those that this rank does not need may be None,
            except the first.
        rank: this rank in the new job, 0 <= rank < size.
        size: M, ranks of the new job.
        rampup_begin_step: first sparsified step.
        op: "average" or "sum".
    """
    first = states[0]
    factor = size / len(states) if op == "average" else 1.0
    replicated_factor = 1.0 if op == "average" else len(states) / size  # each rank holds its share of a sum
    result = copy.deepcopy(first)
    replicated = first["step"] <= rampup_begin_step
    mine = [states[r] for r in old_ranks_of(rank, len(states), size)]
    for name, entry in result["parameters"].items():
        entry.pop("threshold", None)
        for key in own_arrays(entry, replicated):
            total = np.zeros_like(entry[key])
            for state in mine:
                total += state["parameters"][name][key]
            entry[key] = (total * factor).astype(total.dtype)
        if "v" in entry and replicated:
            entry["u"] = (entry["u"] * replicated_factor).astype(entry["u"].dtype)
    return result


def old_ranks_of(rank: int, old_size: int, size: int) -> range:
    """The old ranks whose residuals go to ``rank`` when ``old_size`` ranks become ``size``."""
    return range(rank, old_size, size)
