"""Looking at a saved state of ``DGCMomentum`` before the core gets it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dgc.errors import LayoutError

Shapes = Mapping[str, tuple[int, ...]]

BUFFERS = ("u", "v")
"""Entries of a parameter's state that have its shape."""


class StateError(LayoutError, AssertionError):
    """A state dict that does not fit, which Paddle refuses with an ``AssertionError``."""


@contextlib.contextmanager
def as_state_error() -> Iterator[None]:
    """Turn a state that the core refuses into Paddle's kind of error.

    Raises:
        StateError: (an AssertionError and a ValueError) for a LayoutError inside.
    """
    try:
        yield
    except StateError:
        raise
    except LayoutError as error:
        raise StateError(str(error)) from error


def require_keys(saved: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a state in which something is missing.

    Raises:
        StateError: names the first missing key.
    """
    for key in keys:
        if key not in saved:
            raise StateError(f"the state has no {key!r}; it was not made by DGCMomentum's state_dict()")


def shaped(parameters: Mapping[str, Mapping[str, Any]], shapes: Shapes) -> dict[str, dict[str, Any]]:
    """The parameters of an engine's ``state_dict()``, u and v in the parameters' shapes."""
    return {
        name: {key: value.reshape(shapes[name]) if key in BUFFERS else value for key, value in entry.items()}
        for name, entry in parameters.items()
    }


def flat(
    parameters: Mapping[str, Mapping[str, Any]],
    shapes: Shapes,
    dtypes: Mapping[str, np.dtype],
    allowed: str = "an array",
    flat_too: bool = False,
) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of :func:`shaped`; ``flat_too``: buffers may be flat already. Unknown names are not compared.

    Raises:
        StateError: another shape or type.
        RuntimeError: a value is no array.
    """
    result: dict[str, dict[str, np.ndarray]] = {}
    for name, entry in parameters.items():
        result[name] = {}
        for key, value in entry.items():
            if not isinstance(value, np.ndarray):
                raise RuntimeError(f"{key} of {name!r} is a {type(value).__name__}; allowed: {allowed}")
            if key in BUFFERS and name in shapes:
                if value.shape != shapes[name] and not (flat_too and value.shape == (math.prod(shapes[name]),)):
                    raise StateError(f"{key} of {name!r} has shape {value.shape}, the parameter {shapes[name]}")
                if value.dtype != dtypes[name]:
                    raise StateError(f"{key} of {name!r} is {value.dtype}, the optimizer's is {dtypes[name]}")
            result[name][key] = value.reshape(-1)
    return result
