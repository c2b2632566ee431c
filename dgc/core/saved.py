"""Saved states: check which ones a job may load."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from dgc.core.layout import Layout
from dgc.errors import LayoutError

FORMAT = 1  # the format of states that this version writes and reads

# The state of a compressor that has exchanged nothing. Loading it forgets residuals, momentum and step.
EMPTY: Final[dict[str, Any]] = {"format": FORMAT, "step": 0, "parameters": {}}

# The state of a compressor in a job of one process. Such a job exchanges nothing.
INACTIVE: Final[dict[str, Any]] = {"inactive": True}


def is_empty(state: Mapping[str, Any]) -> bool:
    """Return whether a state holds neither residuals nor momentum nor a step.

    It comes from a compressor that has not exchanged anything yet, or from a job of one process.
    """
    return not state or bool(state.get("inactive")) or (state.get("parameters") == {} and not state.get("step"))


# -- checks --------------------------------------------------------------------------------------------------------


def require_state(state: object) -> None:
    """Refuse an argument of ``load_state_dict`` that is no state."""
    if not isinstance(state, Mapping):
        shown = "None" if state is None else f"a {type(state).__name__}"
        raise LayoutError(
            f"load_state_dict got {shown}; give it the result of state_dict(), or {{}} to begin with empty residuals"
        )


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
    size = saved.get("size", 1)
    if type(size) is not int or size < 1:
        raise LayoutError(f"the saved compressor state has size={size!r}, not a number of ranks; it is damaged")
    if not isinstance(saved.get("parameters"), Mapping):
        raise LayoutError("the saved compressor state holds no parameters; load the result of state_dict()")
    for name, entry in saved["parameters"].items():
        if not isinstance(entry, Mapping) or "u" not in entry:
            raise LayoutError(f"the saved compressor state holds no u of {name!r}; load the result of state_dict()")
        for key in {"u", "v", "error"} & set(entry):
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
        if "error" in entry and not sparsified[name] and name not in small:
            raise LayoutError(
                f"parameter {name!r} is sent exactly here, but was coded when the state was saved; the codec's saved "
                "error would be lost: use the same exclude"
            )
        for key in sorted(wanted | ({"error"} & set(entry))):
            if np.shape(entry[key]) != (length,):
                raise LayoutError(
                    f"parameter {name!r} has {length} elements, its saved {key} has shape "
                    f"{np.shape(entry[key])}; the state belongs to another model"
                )
        kind = np.float64 if parameter.dtype == "float64" else np.float32
        for key in {"u", "v", "error"} & set(entry):
            _require_finite(_cast(entry[key], kind), name, key)


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


# -- ranks ---------------------------------------------------------------------------------------------------------


def own_arrays(entry: Mapping[str, Any], is_shared: bool) -> set[str]:
    """Return the names of a parameter's arrays that differ between ranks.

    Args:
        entry: the parameter's entry in the result of :meth:`dgc.core.state.State.to_dict`.
        is_shared: whether u is the same on all ranks, because the ramp-up has not begun.
    """
    return set(entry) & ({"v", "error", "u"} if "v" in entry and not is_shared else {"v", "error"})


def on_ranks(saved: Mapping[str, Any], size: int) -> Mapping[str, Any]:
    """Return a state that was saved by N ranks as M = ``size`` ranks load it.

    With op "average" it is the same. With op "sum", v, the coding error and u of a sparsified tensor are a rank's share
    of a sum over all ranks: they are multiplied by N/M.
    """
    factor = saved.get("size", size) / size
    if saved.get("op") != "sum" or factor == 1:
        return saved
    parameters = {
        name: {**entry, **{key: (entry[key] * factor).astype(entry[key].dtype) for key in own_arrays(entry, False)}}
        for name, entry in saved["parameters"].items()
    }
    return {**saved, "parameters": parameters}


def digest(value: object, total: int = 0) -> int:
    """Return a checksum of a state, by which ranks compare their states."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            total = digest(value[key], zlib.crc32(str(key).encode(), total))
        return total
    content = np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else repr(value).encode()
    return zlib.crc32(content, total)
