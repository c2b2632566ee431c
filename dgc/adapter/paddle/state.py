"""Looking at a saved state of ``DGCMomentum`` before the core gets it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dgc.errors import LayoutError

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
    missing = [key for key in keys if key not in saved]
    if missing:
        raise StateError(f"the state has no {missing[0]!r}; it was not made by DGCMomentum's state_dict()")


def checked_buffer(
    name: str, key: str, value: Any, shapes: Collection[tuple[int, ...]], dtype: Any, allowed: str = "an array"
) -> np.ndarray:
    """A buffer of a parameter's state, flat.

    Args:
        name: the parameter's.
        key: the buffer's.
        value: what was saved.
        shapes: that it may have, the parameter's own first; none if it is not known.
        dtype: that it must have, where it has the parameter's shape.
        allowed: what it may be, for the error.

    Raises:
        StateError: another shape or type.
        RuntimeError: it is no array.
    """
    if not isinstance(value, np.ndarray):
        raise RuntimeError(f"{key} of {name!r} is a {type(value).__name__}; allowed: {allowed}")
    if key in BUFFERS and shapes:
        if value.shape not in shapes:
            raise StateError(f"{key} of {name!r} has shape {value.shape}, the parameter {next(iter(shapes))}")
        if value.dtype != dtype:
            raise StateError(f"{key} of {name!r} is {value.dtype}, the optimizer's is {np.dtype(dtype)}")
    return value.reshape(-1)
