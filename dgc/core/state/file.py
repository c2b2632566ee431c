"""A compressor's state in a file of its own: NumPy arrays and JSON, no pickle."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from dgc.errors import LayoutError

_HEADER = "header"


def save_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write ``state_dict()`` of one rank, whole or not at all.

    Args:
        path: of the file; the folder is made when it is missing.
        state: nested dictionaries and lists of arrays and plain values.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    header = json.dumps(_take_out(state, arrays))
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        np.savez(file, **arrays, **{_HEADER: np.frombuffer(header.encode(), np.uint8)})  # type: ignore[arg-type]
    draft.replace(path)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save_state` wrote.

    Raises:
        LayoutError: the file is something else, or was cut short.
        OSError: there is no such file, or it cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("a single array")
            with archive:
                return _put_back(json.loads(archive[_HEADER].tobytes().decode()), archive)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise LayoutError(
                f"{path} is no state of a compressor, or damaged; give the file that was saved from one"
            ) from error


def _take_out(value: Any, arrays: dict[str, np.ndarray]) -> Any:
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
