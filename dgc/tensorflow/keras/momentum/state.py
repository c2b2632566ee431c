"""The state of ``DGCMomentum``: u and v in the variables' shapes for the user, flat for the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dgc.adapter.paddle import BUFFERS, StateError, checked_buffer, require_keys

Shapes = Mapping[str, tuple[int, ...]]


def shaped_state(state: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """What an engine's ``state_dict()`` returned, with u and v in the variables' shapes."""
    parameters = {
        name: {key: value.reshape(shapes[name]) if key in BUFFERS else value for key, value in entry.items()}
        for name, entry in state["parameters"].items()
    }
    return {**state, "parameters": parameters}


def flat_state(saved: Any, shapes: Shapes, dtypes: Mapping[str, np.dtype]) -> dict[str, Any]:
    """The inverse of :func:`shaped_state`; flat buffers are taken as they are.

    Args:
        saved: a state of :func:`shaped_state`, perhaps under another model's names.
        shapes: of this model's variables.
        dtypes: of this model's u and v.

    Raises:
        StateError: a key is missing, or a buffer has another shape or type.
        RuntimeError: a buffer is no array.
    """
    require_keys(saved, ("parameters", "step", "rank", "size", "format"))
    listed = [name for group in saved.get("groups", ()) for name in group["names"]]
    missing = [name for name in listed if name not in saved["parameters"]]
    if missing:
        raise StateError(f"the state lacks parameter {missing[0]!r}; it was changed after it was saved")
    parameters = {}
    for name, entry in saved["parameters"].items():
        lost = [key for key in ("u",) if key not in entry]
        if lost:
            raise StateError(f"the state of {name!r} has no {lost[0]!r}")
        parameters[name] = {
            key: _flat(name, key, value, shapes.get(name), dtypes.get(name)) for key, value in entry.items()
        }
    return {**saved, "parameters": parameters}


def _flat(name: str, key: str, value: Any, shape: tuple[int, ...] | None, dtype: np.dtype | None) -> np.ndarray:
    # Names that this model has not are the engine's business: it knows how Keras renames a loaded model's variables.
    shapes: list[tuple[int, ...]] = []
    if shape is not None and dtype is not None:
        shapes = [shape, (int(np.prod(shape, dtype=np.int64)),)]
    return checked_buffer(name, key, value, shapes, dtype)
