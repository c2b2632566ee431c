"""The files of a checkpoint: their names, how they are written and read, and which of them may be deleted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import MAP_LOCATION

from dgc.core.state import write_whole
from dgc.errors import LayoutError

_SHOWN = 3
"""Names of classes in an error."""

MAIN_FILE = "checkpoint.pt"

_FOREIGN = "it was not written by save_checkpoint()"
_RANK_FILE = re.compile(r"compressor-([0-9a-f]+)-(\d+)-of-\d+\.pt(?:\.partial)?")
_MAIN_DRAFT = re.compile(r"checkpoint(?:-([0-9a-f]+))?\.pt\.partial")


def rank_file(token: str, rank: int, size: int) -> str:
    """The name of one rank's file."""
    return f"compressor-{token}-{rank:05d}-of-{size:05d}.pt"


class Written:
    """Files of a save under way. They are locked until :meth:`release`: no other save takes them for leftovers."""

    def __init__(self, token: str) -> None:
        """Begin with none.

        Args:
            token: of the save.
        """
        self._token = token
        self._paths: list[Path] = []
        self._locks: list[int] = []

    def add(self, path: Path, content: object) -> None:
        """Write a file whole or not at all.

        Raises:
            TransportError: it could not be written; a file that was there before stays.
        """
        # Two jobs may save into one directory at the same time.
        name = f"checkpoint-{self._token}.pt" if path.name == MAIN_FILE else path.name
        draft = path.with_name(f"{name}.partial")

        def write(file: BinaryIO) -> None:
            with contextlib.suppress(OSError):  # of a file system without locks
                self._locks.append(os.dup(file.fileno()))
                fcntl.flock(file, fcntl.LOCK_EX)
            _save(content, file)

        write_whole(path, draft, write)
        if path.name != MAIN_FILE:
            self._paths.append(path)

    def discard(self) -> None:
        """Delete them: the save has failed before the checkpoint named them."""
        for path in self._paths:
            _delete(path)

    def release(self) -> None:
        """The save is over."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []


def read(path: Path, advice: str, map_location: MAP_LOCATION = "cpu") -> dict[str, Any]:
    """Load a file after comparing its checksums.

    Args:
        path: of the file.
        advice: what to do where there is none.
        map_location: as in ``torch.load``.

    Raises:
        FileNotFoundError: there is none.
        LayoutError: it is damaged, cut off, or something else than a dict of what can be loaded safely.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {advice}")
    if path.stat().st_size == 0:
        raise LayoutError(f"{path} is empty; take another copy, or an earlier checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not look at the checksums that it writes
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    except Exception as error:  # zipfile and zlib raise whatever they like
        raise LayoutError(
            f"{path} is damaged or cut off, or {_FOREIGN} ({error}); take another copy, or an earlier one"
        ) from error
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # and torch, too
        raise LayoutError(
            f"{path} cannot be loaded: {_FOREIGN}, or by a newer version ({why_refused(path, error)})"
        ) from error
    if not isinstance(content, dict):
        raise LayoutError(f"{path} holds a {type(content).__name__}: {_FOREIGN}")
    return content


def why_refused(file: Path | BinaryIO, error: Exception) -> str:
    """Why ``torch.load`` did not load a file, without its advice to run the code that may be in it."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error).splitlines()[0]
    try:
        kinds = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # torch < 2.6, or what is damaged
        kinds = []
    return f"it holds {', '.join(kinds[:_SHOWN])}" if kinds else "it holds something else than numbers and tensors"


def read_main(folder: Path, map_location: MAP_LOCATION) -> dict[str, Any]:
    """Load the file of rank 0.

    Args:
        folder: the directory.
        map_location: as in ``torch.load``.

    Raises:
        FileNotFoundError: there is none.
        LayoutError: it is damaged or something else.
    """
    path = folder / MAIN_FILE
    advice = "there is no checkpoint in this directory; name the one that was given to save_checkpoint()"
    content = read(path, advice, map_location)
    size, token = content.get("size"), content.get("token")
    known = isinstance(size, int) and size > 0 and isinstance(token, str)
    if not known or not {"model", "optimizer", "extra"} <= set(content):
        raise LayoutError(
            f"{path} is a checkpoint of another kind: {_FOREIGN}. Load it with torch.load() into model and optimizer "
            "on rank 0 and broadcast both; the compressor begins with empty residuals"
        )
    return content


def token_in(folder: Path) -> str | None:
    """Which files the checkpoint in a directory names; None if there is none that can be read."""
    try:
        content = torch.load(folder / MAIN_FILE, map_location="cpu", weights_only=True, mmap=True)
        return str(content["token"])
    except Exception:
        return None


def _delete(path: Path) -> None:
    """What cannot be deleted stays: the checkpoint is whole, and this rank may be the only one to fail."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def sweep(folder: Path, token: str, replaced: str, rank: int, size: int) -> None:
    """Delete this rank's share of a replaced checkpoint's files, and of what failed or killed saves have left.

    A save under way holds its files locked. What is not locked and not named by the checkpoint belongs to none.

    Args:
        folder: the directory.
        token: of the save that has just been completed.
        replaced: of the checkpoint before it, if any: its files go also where the file system has no locks.
        rank: this rank.
        size: number of ranks.
    """
    for path, of in _candidates(folder, rank, size):
        if of == replaced:
            _delete(path)
        elif of != token:
            with _locked(path) as is_free:
                # Asked only now: the save that held it may have completed its checkpoint meanwhile.
                if is_free and token_in(folder) != of:
                    _delete(path)


def _candidates(folder: Path, rank: int, size: int) -> Iterator[tuple[Path, str | None]]:
    """Files that one of ``size`` ranks answers for, and their tokens."""
    for path in sorted(folder.iterdir()):
        found = _RANK_FILE.fullmatch(path.name)
        draft = _MAIN_DRAFT.fullmatch(path.name)
        if found is not None and int(found[2]) % size == rank:
            yield path, found[1]
        elif draft is not None and rank == 0:
            yield path, draft[1]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a file, unless another process has; yields False, too, where the file system has no locks."""
    try:
        file = path.open("r+b")
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _save(content: object, file: BinaryIO) -> None:
    """``torch.save`` with checksums, and with the error of the file where torch raises one of its own."""
    with _checksums():
        try:
            torch.save(content, file)
        except RuntimeError:
            file.flush()  # what could not be written is still in the buffer: this raises the reason
            raise


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Since some version of torch users can do without them."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(chosen)
