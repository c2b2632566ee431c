"""The errors that this package raises on purpose. A message says what was given, what is allowed and what to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

# A file of the project that is named dgc on PyPI: an environment with both has one folder for them.
if (Path(__file__).parent / "vade.py").exists():
    raise ImportError(
        "the package named dgc on PyPI, another project, is installed in this environment, and its files lie in the "
        "same folder: pip uninstall dgc deep-gradient-compression, then install deep-gradient-compression alone"
    )

__all__ = ["ConfigError", "DGCError", "LayoutError", "RemoteError", "StallError", "TransportError", "WireError"]


class DGCError(Exception):
    """The base class of all errors that this package raises on purpose."""


class ConfigError(DGCError, ValueError):
    """An option is out of range, or options do not fit together."""


class LayoutError(DGCError, ValueError):
    """Parameters, gradients or a saved state do not fit the compressor."""


class WireError(DGCError, ValueError):
    """A message is damaged, or was written by another version, layout or codec."""


class TransportError(DGCError, RuntimeError):
    """Bytes could not be moved between the ranks, or another rank reported an error."""


class StallError(TransportError):
    """Other ranks did not reach a collective in time."""


class RemoteError(TransportError):
    """Another rank failed; the error is raised on every rank."""


Error = TypeVar("Error", bound=DGCError)


def unraised(error: Error) -> Error:
    """Return a copy of an error without its traceback, so that the copy can be stored.

    A traceback refers to the frames that the error has passed through, and keeps the caller's model alive.
    """
    other = copy.copy(error)
    other.__cause__ = error.__cause__
    return other
