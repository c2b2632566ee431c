"""The state of ``DGCMomentum``: u and v in the variables' shapes for the user, flat for the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dgc.adapter.paddle import StateError

Shapes = Mapping[str, tuple[int, ...]]

_REQUIRED = ("parameters", "step", "rank", "size", "format")
_BUFFERS = ("u", "v")


def shaped_state(state: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """What an engine's ``state_dict()`` returned, with u and v in the variables' shapes."""
    parameters = {
        name: {key: value.reshape(shapes[name]) if key in _BUFFERS else value for key, value in entry.items()}
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
    missing = [key for key in _REQUIRED if key not in saved]
    if missing:
        raise StateError(f"the state has no {missing[0]!r}; it was not made by DGCMomentum's state_dict()")
    listed = [name for group in saved.get("groups", ()) for name in group["names"]]
    lacking = [name for name in listed if name not in saved["parameters"]]
    if lacking:
        raise StateError(f"the state lacks parameter {lacking[0]!r}; it was changed after it was saved")
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
    if not isinstance(value, np.ndarray):
        raise RuntimeError(f"{key} of {name!r} is a {type(value).__name__}; allowed: an array")
    # Names that this model has not are the engine's business: it knows how Keras renames a loaded model's variables.
    if key in _BUFFERS and shape is not None and dtype is not None:
        if value.shape not in (shape, (int(np.prod(shape, dtype=np.int64)),)):
            raise StateError(f"{key} of {name!r} has shape {value.shape}, the variable {shape}")
        if value.dtype != dtype:
            raise StateError(f"{key} of {name!r} is {value.dtype}, the optimizer's is {dtype}")
    return value.reshape(-1)
