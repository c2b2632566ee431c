"""Saved states: check which ones a rank may load, and convert them for another number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dgc.core.layout import Layout
from dgc.errors import LayoutError

FORMAT = 1  # the format of states that this version writes and reads

# The state of a compressor that has exchanged nothing. Loading it forgets residuals, momentum and step.
EMPTY: Final[dict[str, Any]] = {"format": FORMAT, "step": 0, "parameters": {}}

# The state of a compressor in a job of one process. Such a job exchanges nothing.
INACTIVE: Final[dict[str, Any]] = {"inactive": True, "rank": 0, "size": 1}


def is_empty(state: Mapping[str, Any]) -> bool:
    """Return whether a state comes from a job of several ranks whose compressor has not exchanged anything yet."""
    return not state or ("parameters" in state and not state["parameters"] and not state.get("step"))


def holds_nothing(state: Mapping[str, Any]) -> bool:
    """Return whether a state holds neither residuals nor momentum: it is empty, or comes from a single process."""
    return is_empty(state) or bool(state.get("inactive"))


# -- checks --------------------------------------------------------------------------------------------------------


def require_states(state: object, resize: bool) -> list[Any]:
    """Return the argument of ``load_state_dict`` as a list of states, some of which may be None."""
    if isinstance(state, Mapping):
        return [state]
    if not isinstance(state, Sequence) or isinstance(state, (str, bytes)):
        shown = "None" if state is None else f"a {type(state).__name__}"
        raise LayoutError(
            f"load_state_dict got {shown}; give it what state_dict() returned on this rank, or {{}} to begin with "
            "empty residuals"
        )
    if not resize or not len(state):
        raise LayoutError(f"load_state_dict got {len(state)} states; pass this rank's state, or resize=True")
    for rank, each in enumerate(state):
        if not isinstance(each, Mapping) and (each is not None or rank == 0):
            raise LayoutError(
                f"load_state_dict got {each if each is None else 'a ' + type(each).__name__} as the state of old rank "
                f"{rank}; give it the result of state_dict() on that rank"
            )
    return list(state)


def require_place(saved: Mapping[str, Any], rank: int, size: int, op: str, nodes: int | None = None) -> None:
    """Refuse a state of another rank, or of a job with another number of ranks or nodes or another op."""
    if saved.get("nodes") != nodes:
        theirs, ours = ("each rank" if n is None else f"each of {n} nodes" for n in (saved.get("nodes"), nodes))
        raise LayoutError(
            f"in the job that saved this compressor state, {theirs} had its own residuals; in this job, {ours} has. "
            "Load it on the same number of ranks and nodes, with the same hierarchical=..., or load only the model"
        )
    if saved.get("size") != size:
        raise LayoutError(
            f"the compressor state was saved by {saved.get('size')} ranks, this job has {size}; pass the "
            "states of all old ranks and resize=True to redistribute the residuals"
        )
    if saved.get("rank") != rank:
        raise LayoutError(
            f"the saved compressor state belongs to rank {saved.get('rank')}, this is rank {rank}; residuals "
            "differ between ranks: save and load one state per rank"
        )
    require_op(saved, op)


def require_op(saved: Mapping[str, Any], op: str) -> None:
    """Refuse a state that was saved with another op, because the u of a sum is P times as large as that of a mean."""
    theirs = saved.get("op")
    if theirs != op:
        raise LayoutError(
            f"the compressor state was saved with op={theirs}, this job has op={op}; give this job "
            f"op={theirs} (and the learning rate that belongs to it), or load only model and optimizer, and begin with "
            "momentum 0"
        )


def require_sound(saved: Mapping[str, Any]) -> None:
    """Refuse a mapping that is not a compressor's state, and values that are not finite."""
    if saved.get("format") != FORMAT:
        raise LayoutError(
            f"this compressor state has format {saved.get('format')!r}, this version reads {FORMAT}; "
            "load it with the version that wrote it"
        )
    step = saved.get("step")
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise LayoutError(f"the saved compressor state has step={step!r}, not a number of steps; it is damaged")
    if not isinstance(saved.get("parameters"), Mapping):
        raise LayoutError("the saved compressor state holds no parameters; load the result of state_dict()")
    for name, entry in saved["parameters"].items():
        if not isinstance(entry, Mapping) or "u" not in entry:
            raise LayoutError(f"the saved compressor state holds no u of {name!r}; load the result of state_dict()")
        for key in {"u", "v", "error", "w"} & set(entry):
            _require_finite(_numbers(entry[key], name, key), name, key)
        if entry.get("threshold") is not None:
            _numbers(entry["threshold"], name, "threshold")
    for key in ("names", "kinds"):  # the adapters add these and the learning rate
        value = saved.get(key, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            raise LayoutError(f"the saved compressor state has {key}={value!r:.80}, not a list of names; it is damaged")
    kinds = zip(saved.get("names", ()), saved.get("kinds", ()), strict=False)
    if any(kind != "none" and name not in saved["parameters"] for name, kind in kinds):
        raise LayoutError("the saved compressor state comes without its variables; it is damaged")
    rate = saved.get("rate")
    if rate is not None and not isinstance(rate, (int, float)):
        raise LayoutError(f"the saved compressor state has rate={rate!r:.80}, not a number; it is damaged")


def require_fit(saved: Mapping[str, Any], layout: Layout, optional: Collection[str] = ()) -> None:
    """Refuse a sound state whose parameters differ from the layout's, or whose values are too large for their types.

    Parameters named in ``optional`` may be present or missing.
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
    for parameter in layout.parameters:
        name, length = parameter.name, parameter.numel
        if name not in found:
            continue
        entry, wanted = found[name], {"u", "v"} if sparsified[name] else {"u"}
        if {"u", "v"} & set(entry) != wanted:
            now, then = ("sparsified", "dense") if "v" in wanted else ("dense", "sparsified")
            raise LayoutError(
                f"parameter {name!r} is {now} here but was {then} when the state was saved; "
                "use the same min_numel, include and exclude"
            )
        if {"error", "w"} & set(entry) and not sparsified[name] and name not in small:
            raise LayoutError(
                f"parameter {name!r} is sent exactly here, but was coded when the state was saved; the codec's saved "
                "error would be lost: use the same exclude"
            )
        for key in sorted(wanted | ({"error", "w"} & set(entry))):
            if np.shape(entry[key]) != (length,):
                raise LayoutError(
                    f"parameter {name!r} has {length} elements, its saved {key} has shape "
                    f"{np.shape(entry[key])}; the state belongs to another model"
                )
        kind = np.float64 if parameter.dtype == "float64" else np.float32
        held = {key: _cast(entry[key], kind) for key in ("u", "v", "error", "w") if key in entry}
        for key, values in held.items():
            _require_finite(values, name, key)
        if "w" in held:  # a rank adds the sums that it does not own to its own residual
            own = "v" if "v" in held else "error"
            with np.errstate(over="ignore"):
                _require_finite(held["w"] + held.get(own, 0), name, f"{own} + w")


def _require_finite(values: np.ndarray, name: str, key: str) -> None:
    if not np.isfinite(values).all():
        raise LayoutError(
            f"the saved {key} of {name!r} holds {int((~np.isfinite(values)).sum())} values that are not finite, which "
            "would spoil the training: load an earlier state, or call reset() to begin with empty residuals"
        )


def _cast(values: Any, kind: type) -> np.ndarray:
    """Return values in the type that they are held in; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        cast: np.ndarray = np.asarray(values).astype(kind, copy=False)
    return cast


def _numbers(values: object, name: str, key: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"the saved {key} of {name!r} is not an array: {error}") from error
    if array.dtype.kind not in "fiu":
        raise LayoutError(f"the saved {key} of {name!r} is an array of {array.dtype}, not of numbers")
    return array


# -- another number of ranks ---------------------------------------------------------------------------------------


def own_arrays(entry: dict[str, Any], is_shared: bool) -> set[str]:
    """Return the names of a parameter's arrays that differ between ranks.

    Args:
        entry: the parameter's entry in the result of :meth:`dgc.core.state.State.to_dict`.
        is_shared: whether u is the same on all ranks, because the ramp-up has not begun.
    """
    return set(entry) & ({"v", "error", "w", "u"} if "v" in entry and not is_shared else {"v", "error", "w"})


def own_state(
    states: Sequence[Any], rank: int, size: int, rampup_begin_step: int, *, op: str = "average"
) -> dict[str, Any]:
    """Check that the states come from one job, and return a rank's state, made by :func:`resized`."""
    first, old_size = states[0], states[0].get("size")
    if first.get("nodes") is not None:
        raise LayoutError(
            f"the compressor states were saved by {first['nodes']} nodes (hierarchical=...), and resize=True cannot "
            f"convert such states: load them on {old_size} ranks of {first['nodes']} nodes, or load only the model"
        )
    if len(states) != old_size:
        raise LayoutError(f"resize=True needs the states of all {old_size} old ranks in rank order, got {len(states)}")
    for old in {0, *old_ranks_of(rank, old_size, size)}:
        _require_alike(first, states[old], old)
    return {**resized(states, rank, size, rampup_begin_step, op=op), "rank": rank, "size": size}


def _require_alike(first: Mapping[str, Any], state: Any, rank: int) -> None:
    """Refuse states that were not saved together, because their sum would make no sense."""
    if state is None:
        raise LayoutError(f"this rank needs the state of old rank {rank}: pass the states of all old ranks")
    if state.get("rank") != rank or state.get("size") != first["size"]:
        raise LayoutError(
            f"the state at index {rank} belongs to rank {state.get('rank')} of {state.get('size')}; resize=True needs "
            f"the states of all {first['size']} old ranks in rank order"
        )
    if state.get("step") != first.get("step"):
        raise LayoutError(
            f"old rank {rank} saved its state in step {state.get('step')}, rank 0 in step {first.get('step')}; "
            "resize=True needs states that were saved together"
        )
    if _shapes(state) != _shapes(first):
        raise LayoutError(f"the state of old rank {rank} belongs to another model than that of rank 0")


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    parameters = state.get("parameters")
    if not isinstance(parameters, Mapping) or not all(isinstance(e, Mapping) for e in parameters.values()):
        raise LayoutError("a saved compressor state holds no parameters; load the result of state_dict()")
    return {n: {k: np.shape(e[k]) for k in ("u", "v", "error", "w") if k in e} for n, e in parameters.items()}


def resized(
    states: Sequence[dict[str, Any]], rank: int, size: int, rampup_begin_step: int, *, op: str = "average"
) -> dict[str, Any]:
    """Turn the states of N old ranks into this rank's state in a job of M ranks.

    Residuals (also of small tensors) and momentum buffers of the old ranks r with ``r % M == rank`` are summed and
    multiplied by M/N. This keeps their mean over the ranks. With ``op="sum"`` they are only summed, which keeps their
    sum. Arrays that are equal on all ranks do not change: all arrays before the ramp-up, and the momentum buffers of
    dense tensors. One exception: with ``op="sum"``, u of a sparsified tensor is a rank's share. Before the ramp-up, it
    is multiplied by N/M.

    Args:
        states: (N,) results of :meth:`dgc.core.state.State.to_dict` in rank order. A state that this rank does not need
            may be None, except the first.
        rank: this rank in the new job, 0 <= rank < size.
        size: M, the number of ranks in the new job.
        rampup_begin_step: the first sparsified step.
        op: "average" or "sum".
    """
    first = states[0]
    factor = size / len(states) if op == "average" else 1.0
    share_factor = 1.0 if op == "average" else len(states) / size
    is_shared = first["step"] <= rampup_begin_step
    mine = [states[r] for r in old_ranks_of(rank, len(states), size)]
    parameters: dict[str, dict[str, Any]] = {}
    for name, entry in first["parameters"].items():
        own = own_arrays(entry, is_shared)
        parameters[name] = new = {}
        for key, values in entry.items():
            if key in own:
                new[key] = total = np.zeros_like(values)
                for state in mine:
                    total += state["parameters"][name][key]
                total *= factor
            elif key != "threshold":
                new[key] = copy.deepcopy(values)
        if "v" in entry and is_shared:
            new["u"] = (new["u"] * share_factor).astype(new["u"].dtype)
    others = {key: value for key, value in first.items() if key != "parameters"}
    return {**copy.deepcopy(others), "parameters": parameters}


def old_ranks_of(rank: int, old_size: int, size: int) -> range:
    """Return the old ranks whose residuals go to ``rank`` when ``old_size`` ranks become ``size``."""
    return range(rank, old_size, size)


def needed_ranks(rank: int, old_size: int, size: int) -> list[int]:
    """Return the old ranks whose states ``rank`` reads: its own, or those that :func:`resized` needs."""
    return [rank] if old_size == size else sorted({0, *old_ranks_of(rank, old_size, size)})
