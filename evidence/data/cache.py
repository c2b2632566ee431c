"""The user's cache: data are built once, by one process, and appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evidence.application import EvidenceError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/dgc-evidence``, or ``~/.cache/dgc-evidence``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dgc-evidence"


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Let ``write`` fill a binary file that takes ``path``'s place when it is whole.

    Args:
        path: of the file; its folder is made.
        write: gets the open file.

    Raises:
        EvidenceError: it cannot be written; what was there before stays.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            temporary = Path(file.name)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is for its owner alone; this one is for whom files are as a rule.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be written ({error.strerror or error}); make room there, and call again"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def build_once(name: str, build: Callable[[], dict[str, np.ndarray]]) -> Path:
    """A file of arrays in the cache, which ``build`` makes if it is not there.

    Args:
        name: of the file, with all that its content depends on (a version, a size), without ".npz".
        build: name -> array.

    Raises:
        EvidenceError: the cache cannot be written.
    """
    path = cache_folder() / f"{name}.npz"
    if not path.exists():
        arrays = build()
        write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return path


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of :func:`build_once`.

    Raises:
        EvidenceError: they are not there, or damaged.
    """
    path = cache_folder() / f"{name}.npz"
    try:
        with np.load(path) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except FileNotFoundError:
        raise EvidenceError(f"{path} is missing; it is built by python -m evidence before the ranks start") from None
    except (OSError, ValueError, EOFError) as error:
        raise EvidenceError(f"{path} is damaged ({error}); delete it, and call again") from error
