"""What a compressor remembers on one rank: momentum buffers u, residuals v, the step; and how to save them.

State is per rank: u and v differ between ranks once sparsification has begun, and must never be broadcast.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dgc.core.kernels.base import Array, Kernels
from dgc.core.kernels.threshold import new_thresholds
from dgc.core.layout import Layout, Segment
from dgc.errors import LayoutError, TransportError


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
        self.thresholds = new_thresholds(segments)
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

    def __init__(self, layout: Layout, kernels: Kernels, own_share: float = 1.0) -> None:
        """Start from zeros at step 0.

        Args:
            layout: the parameters.
            kernels: where u and v are.
            own_share: see :meth:`dgc.core.config.DGCConfig.own_share`.
        """
        self._layout, self.own_share = layout, own_share
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

    def absorb_momentum(self, parameter: int, values: Any) -> None:
        """Set u of one parameter to its share of the momentum buffer, (numel,), of a dense run."""
        share = self._share_of(parameter)
        self.set_momentum_buffer(parameter, values if share == 1.0 else values * values.dtype.type(share))

    def whole_momentum(self, parameter: int) -> np.ndarray:
        """Return a copy of u, (numel,), scaled from this rank's share to the whole momentum."""
        share = self._share_of(parameter)
        u = self._memory.to_host(self.momentum_buffer(parameter))
        return u if share == 1.0 else u / u.dtype.type(share)

    def _share_of(self, parameter: int) -> float:
        return self.own_share if self._layout.is_sparsified(parameter) else 1.0

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
            elif self.buckets[self._layout.places[i][0]].residual_pending and self.error(i).size:
                entry["error"] = self.error(i).copy()
            parameters[p.name] = entry
        return {"format": FORMAT, "step": self.step, "parameters": parameters}

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what :meth:`to_dict` returned.

        Raises:
            LayoutError: another format, other parameters, other lengths, or values that are not finite; nothing is
                changed then.
        """
        require_sound(saved)
        require_fit(saved, self._layout)
        for bucket in self.buckets:
            bucket.clear_error()
        for i, p in enumerate(self._layout.parameters):
            entry = saved["parameters"][p.name]
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
    replicated = first["step"] <= rampup_begin_step
    mine = [states[r] for r in old_ranks_of(rank, len(states), size)]
    parameters: dict[str, dict[str, Any]] = {}
    for name, entry in first["parameters"].items():
        own = own_arrays(entry, replicated)
        parameters[name] = new = {}
        for key, values in entry.items():
            if key in own:
                new[key] = total = np.zeros_like(values)
                for state in mine:
                    total += state["parameters"][name][key]
                total *= factor
            elif key != "threshold":
                new[key] = copy.deepcopy(values)
        if "v" in entry and replicated:
            new["u"] = (new["u"] * replicated_factor).astype(new["u"].dtype)
    others = {key: value for key, value in first.items() if key != "parameters"}
    return {**copy.deepcopy(others), "parameters": parameters}


def old_ranks_of(rank: int, old_size: int, size: int) -> range:
    """The old ranks whose residuals go to ``rank`` when ``old_size`` ranks become ``size``."""
    return range(rank, old_size, size)


def needed_ranks(rank: int, old_size: int, size: int) -> list[int]:
    """The old ranks whose states ``rank`` reads: its own, or those that :func:`resized` needs."""
    return [rank] if old_size == size else sorted({0, *old_ranks_of(rank, old_size, size)})


FORMAT = 1
"""Of the states that this version writes and reads."""


def require_place(saved: Mapping[str, Any], rank: int, size: int, op: str, nodes: int | None = None) -> None:
    """Refuse a ``state_dict()`` of another rank, or of a job of another size, number of nodes or op."""
    if saved.get("nodes") != nodes:
        theirs, ours = ("single ranks" if n is None else f"{n} nodes" for n in (saved.get("nodes"), nodes))
        raise LayoutError(
            f"the saved compressor state is one of {theirs}, but {ours} send in this job, with other residuals. Load "
            "it on as many ranks and nodes with the same hierarchical=..., or go on from the model alone"
        )
    if saved.get("size") != size:
        raise LayoutError(
            f"the saved compressor state is one of {saved.get('size')} ranks, this job has {size}; pass the "
            "states of all old ranks and resize=True to redistribute the residuals"
        )
    if saved.get("rank") != rank:
        raise LayoutError(
            f"the saved compressor state belongs to rank {saved.get('rank')}, this is rank {rank}; residuals "
            "differ between ranks: save and load one state per rank"
        )
    require_op(saved, op)


def require_op(saved: Mapping[str, Any], op: str) -> None:
    """Refuse a state that was saved under another op: u is the velocity of a mean or of a sum, P times as large."""
    theirs = saved.get("op")
    if theirs != op:
        raise LayoutError(
            f"the saved compressor state was saved with op={theirs}, this job has op={op}; give this job "
            f"op={theirs} (and the learning rate that belongs to it), or load model and optimizer alone, which begins "
            "with momentum 0"
        )


def require_sound(saved: Mapping[str, Any]) -> None:
    """Refuse what :meth:`dgc.core.state.State.to_dict` does not return, or what would spoil the training."""
    if saved.get("format") != FORMAT:
        raise LayoutError(
            f"this compressor state has format {saved.get('format')!r}, this version reads {FORMAT}; "
            "load it with the version that wrote it"
        )
    step = saved.get("step")
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise LayoutError(f"the saved compressor state says step {step!r}, which is no number of steps; it is damaged")
    if not isinstance(saved.get("parameters"), Mapping):
        raise LayoutError("the saved compressor state holds no parameters; give it what state_dict() returned")
    for name, entry in saved["parameters"].items():
        if not isinstance(entry, Mapping) or "u" not in entry:
            raise LayoutError(f"the saved compressor state holds no u of {name!r}; give it what state_dict() returned")
        for key in {"u", "v", "error"} & set(entry):
            values = _numbers(entry[key], name, key)
            if not np.isfinite(values).all():
                raise LayoutError(
                    f"the saved {key} of {name!r} holds {int((~np.isfinite(values)).sum())} values that are not "
                    "finite, which would spoil the training: load an earlier state, or call reset() to begin with "
                    "empty residuals"
                )
        if entry.get("threshold") is not None:
            _numbers(entry["threshold"], name, "threshold")


def require_fit(saved: Mapping[str, Any], layout: Layout, optional: Collection[str] = ()) -> None:
    """Refuse a sound state of other parameters than the layout's.

    ``optional``: names of those that the state need not have, and of others that it may have.
    """
    found, sparsified = saved["parameters"], layout.sparsified()
    missing = [n for n in sparsified if n not in found and n not in optional]
    surplus = [n for n in found if n not in sparsified and n not in optional]
    if missing or surplus:
        what = f"lacks parameter {missing[0]!r}" if missing else f"has a parameter {surplus[0]!r} too many"
        raise LayoutError(
            f"the saved compressor state {what}; it belongs to another model or another choice of parameters: "
            "build the compressor for the model that was saved, or call reset() to start with empty residuals"
        )
    small = {layout.parameters[s.parameter].name for b in layout.buckets for s in b.small}
    for name, length in ((p.name, p.numel) for p in layout.parameters):
        if name not in found:
            continue
        entry, wanted = found[name], {"u", "v"} if sparsified[name] else {"u"}
        if {"u", "v"} & set(entry) != wanted:
            now, then = ("sparsified", "dense") if "v" in wanted else ("dense", "sparsified")
            raise LayoutError(
                f"parameter {name!r} is {now} here but was {then} when the state was saved; "
                "use the same min_numel, include and exclude"
            )
        if "error" in entry and name not in small:
            raise LayoutError(
                f"parameter {name!r} is sent exactly here, and was coded when the state was saved; what the codec had "
                "lost would be dropped: use the same exclude"
            )
        for key in sorted(wanted | ({"error"} & set(entry))):
            if np.shape(entry[key]) != (length,):
                raise LayoutError(
                    f"parameter {name!r} has {length} elements, its saved {key} has shape "
                    f"{np.shape(entry[key])}; the state belongs to another model"
                )


def _numbers(values: object, name: str, key: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"the saved {key} of {name!r} is no array: {error}") from error
    if array.dtype.kind not in "fiu":
        raise LayoutError(f"the saved {key} of {name!r} holds no numbers but {array.dtype}")
    return array


_HEADER = "header"


def save_state(path: str | os.PathLike[str], state: dict[str, Any], ready: Callable[[], None] = lambda: None) -> None:
    """Write ``state_dict()`` of one rank, whole or not at all; other arguments as for :func:`write_whole`.

    Raises:
        TransportError: it could not be written; the file that was there before stays.
    """
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    header = json.dumps(_take_out(state, arrays))

    def write(file: BinaryIO) -> None:
        np.savez(file, **arrays, **{_HEADER: np.frombuffer(header.encode(), np.uint8)})  # type: ignore[arg-type]

    write_whole(path, path.with_name(path.name + ".part"), write, ready)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save_state` wrote. Its checksums are compared.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        LayoutError: it is something else, damaged or cut off.
    """
    try:
        file = Path(path).open("rb")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing; put the states of all ranks where they were saved") from error
    with file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                loaded: dict[str, Any] = _put_back(json.loads(archive[_HEADER].tobytes().decode()), archive)
                return loaded
        except Exception as error:  # NumPy, zipfile, zlib and json raise whatever they like
            raise LayoutError(
                f"{path} is no state of a compressor, or damaged; give the file that was saved from one, or an earlier "
                f"one ({type(error).__name__}: {error})"
            ) from error


def write_whole(
    path: Path, draft: Path, write: Callable[[BinaryIO], None], ready: Callable[[], None] = lambda: None
) -> None:
    """Write a file whole or not at all; what was there before stays until then.

    Args:
        path: of the file; the folder is made when it is missing.
        draft: where it is written first; removed when that fails.
        write: writes the content.
        ready: called when everything is written, before it takes the file's place; where it raises, it does not.

    Raises:
        TransportError: it could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a network's file system may say only now that it is full
        ready()
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the folder may be what cannot be written
            draft.unlink()
        if isinstance(error, OSError):
            raise TransportError(
                f"{path} could not be written: {error.strerror or error}; what was saved before stays. Make room or "
                "mend the folder, or save elsewhere"
            ) from error
        raise


def _take_out(value: object, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        key = f"array{len(arrays)}"
        arrays[key] = value
        return {"__array__": key}
    if isinstance(value, dict):
        return {k: _take_out(v, arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take_out(v, arrays) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _put_back(value: Any, archive: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__array__"}:
            return archive[value["__array__"]]
        return {k: _put_back(v, archive) for k, v in value.items()}
    if isinstance(value, list):
        return [_put_back(v, archive) for v in value]
    return value
