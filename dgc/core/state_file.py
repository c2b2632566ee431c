"""Write and read the file of one rank's saved state."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dgc.errors import LayoutError, TransportError

_HEADER = "header"


def save_state(path: str | os.PathLike[str], state: dict[str, Any], ready: Callable[[], None] = lambda: None) -> None:
    """Write one rank's ``state_dict()`` into a file, completely or not at all; see :func:`write_whole` for ``ready``.

    Raises:
        TransportError: the file could not be written; an earlier file stays.
    """
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    header = json.dumps(_take_out(state, arrays))

    def write(file: BinaryIO) -> None:
        np.savez(file, **arrays, **{_HEADER: np.frombuffer(header.encode(), np.uint8)})  # type: ignore[arg-type]

    write_whole(path, path.with_name(path.name + ".part"), write, ready)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of :func:`save_state`, and compare its checksums.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file cannot be read.
        LayoutError: the file is of another kind, damaged or cut off.
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
        except Exception as error:  # NumPy, zipfile, zlib and json raise all kinds of errors
            raise LayoutError(
                f"{path} is no state of a compressor, or damaged; give the file that a state was saved to, or an "
                f"earlier one ({type(error).__name__}: {error})"
            ) from error


def write_whole(
    path: Path, draft: Path, write: Callable[[BinaryIO], None], ready: Callable[[], None] = lambda: None
) -> None:
    """Write a file completely or not at all: an earlier file stays until the new one is complete.

    Args:
        path: the file's path; the folder is made if it is missing.
        draft: the temporary file that is written first; it is removed after an error.
        write: writes the content.
        ready: called when everything is written, before the file is moved to ``path``. If it raises, the file is not
            moved.

    Raises:
        TransportError: the file could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a network file system may report only now that it is full
        ready()
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the folder itself may be unusable
            draft.unlink()
        if isinstance(error, OSError):
            raise TransportError(
                f"{path} could not be written: {error.strerror or error}; what was saved before stays. Free some space "
                "or repair the folder, or save elsewhere"
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
