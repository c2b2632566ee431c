"""Write and read the file of a saved state."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dgc.errors import LayoutError, TransportError

_HEADER = "header"


def save_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a result of ``state_dict()`` into a file, completely or not at all: an earlier file stays until then.

    The folder is made if it is missing.

    Raises:
        TransportError: the file could not be written.
    """
    path, draft = Path(path), Path(f"{os.fspath(path)}.part")
    arrays: dict[str, np.ndarray] = {}
    header = json.dumps(take_out(state, arrays))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            np.savez(file, **arrays, **{_HEADER: np.frombuffer(header.encode(), np.uint8)})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())  # a network file system may report only now that it is full
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
        raise FileNotFoundError(f"{path} is missing; give the file that a state was saved to") from error
    with file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                loaded: dict[str, Any] = put_back(json.loads(archive[_HEADER].tobytes().decode()), archive)
                return loaded
        except Exception as error:  # NumPy, zipfile, zlib and json raise all kinds of errors
            raise LayoutError(
                f"{path} is no state of a compressor, or damaged; give the file that a state was saved to, or an "
                f"earlier one ({type(error).__name__}: {error})"
            ) from error


def take_out(value: object, arrays: dict[str, np.ndarray]) -> Any:
    """Return a state as JSON knows it. Its arrays are moved into ``arrays``, under names that stand in their places."""
    if isinstance(value, np.ndarray):
        key = f"array{len(arrays)}"
        arrays[key] = value
        return {"__array__": key}
    if isinstance(value, dict):
        return {k: take_out(v, arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [take_out(v, arrays) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def put_back(value: Any, archive: Any) -> Any:
    """Undo :func:`take_out`; ``archive`` has the arrays by their names."""
    if isinstance(value, dict):
        if set(value) == {"__array__"}:
            return archive[value["__array__"]]
        return {k: put_back(v, archive) for k, v in value.items()}
    if isinstance(value, list):
        return [put_back(v, archive) for v in value]
    return value
