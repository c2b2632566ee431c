"""Looking at a saved state before anything is changed: is it one, whose is it, is it sound, does it fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dgc.errors import LayoutError

FORMAT = 1
"""Of the states that this version writes and reads."""


def require_place(saved: Mapping[str, Any], rank: int, size: int, op: str, nodes: int | None = None) -> None:
    """Refuse a ``state_dict()`` of another rank, or of a job of another size, number of nodes or op.

    Raises:
        LayoutError: it is one.
    """
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
    """Refuse a state that was saved under another op: u is the velocity of a mean or of a sum, P times as large.

    Raises:
        LayoutError: it is one.
    """
    theirs = saved.get("op")
    if theirs != op:
        raise LayoutError(
            f"the saved compressor state was saved with op={theirs}, this job has op={op}; give this job "
            f"op={theirs} (and the learning rate that belongs to it), or load model and optimizer alone, which begins "
            "with momentum 0"
        )


def require_sound(saved: Mapping[str, Any]) -> None:
    """Refuse what :meth:`dgc.core.state.state.State.to_dict` does not return, or what would spoil the training.

    Raises:
        LayoutError: another format, or a part of it is missing, of another kind or not finite.
    """
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


def require_fit(
    saved: Mapping[str, Any],
    sparsified: Mapping[str, bool],
    lengths: Mapping[str, int],
    optional: Collection[str] = (),
    *,
    small: Collection[str],
) -> None:
    """Refuse a sound state of other parameters.

    Args:
        saved: as in :func:`require_sound`.
        sparsified: name -> whether a parameter is sent sparsified.
        lengths: name -> number of elements, of the same parameters.
        optional: names of those that the state need not have, and of others that it may have.
        small: names of those that may be sent coded, and so may have a residual of the codec's.

    Raises:
        LayoutError: it has other parameters, of other lengths, or they were sent otherwise.
    """
    found = saved["parameters"]
    missing = [n for n in lengths if n not in found and n not in optional]
    surplus = [n for n in found if n not in lengths and n not in optional]
    if missing or surplus:
        what = f"lacks parameter {missing[0]!r}" if missing else f"has a parameter {surplus[0]!r} too many"
        raise LayoutError(
            f"the saved compressor state {what}; it belongs to another model or another choice of parameters: "
            "build the compressor for the model that was saved, or call reset() to start with empty residuals"
        )
    for name, length in lengths.items():
        if name not in found:
            continue
        entry, wanted = found[name], {"u", "v"} if sparsified[name] else {"u"}
        if sparsified[name] and entry.get("exchange") == "dense" and "v" not in entry:
            wanted = {"u"}
        if {"u", "v"} & set(entry) != wanted:
            now, then = ("sparsified", "dense") if "v" in wanted else ("dense", "sparsified")
            raise LayoutError(
                f"parameter {name!r} is {now} here but was {then} when the state was saved; "
                "use the same min_numel, include, exclude and exchange"
            )
        if "error" in entry and name not in small:
            raise LayoutError(
                f"parameter {name!r} is sent exactly here, and was coded when the state was saved; what the codec had "
                "lost would be dropped: use the same exclude and exchange"
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
