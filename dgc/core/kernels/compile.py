"""Compile kernels: without the interpreter lock, and cached on disk.

This module imports Numba; only modules that are loaded on first use may import it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numba
from llvmlite import binding

F = TypeVar("F", bound=Callable[..., Any])

# no_cfunc_wrapper: the wrappers would serve calls from C, which do not occur, and they take time to compile.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


@cache
def cache_directory() -> str:
    """Return the directory of the compiled kernels, in NUMBA_CACHE_DIR if that is set.

    Each version of the sources and each kind of processor has its own directory, for two reasons. Numba notices changes
    only in the file that defines a kernel, not in the files of the functions that the kernel calls. And Numba's index
    is not safe if different kinds of processors share a home directory.
    """
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for file in sorted(here.glob("*.py")):
        digest.update(file.read_bytes())
    digest.update(f"{numba.__version__} {binding.get_host_cpu_name()}".encode())
    digest.update(repr(sorted(binding.get_host_cpu_features().items())).encode())
    digest.update(f"{os.environ.get('NUMBA_CPU_NAME')} {os.environ.get('NUMBA_CPU_FEATURES')}".encode())
    return str(Path(numba.config.CACHE_DIR or _user_cache()) / f"kernels-{digest.hexdigest()}")


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "dgc"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    except (OSError, RuntimeError):
        return Path(tempfile.gettempdir()) / f"dgc-{os.getuid()}"


@cache
def usable(directory: str) -> bool:
    """Return whether kernels may be kept in a directory. Make the directory if it is missing.

    Numba's index of a kernel is a pickle, which may run any code. So the directory is used only if no other user can
    write to it or replace it.
    """
    path = Path(directory)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        if not os.access(path, os.W_OK):
            return False
        refused = [each for each in (path, path.parent) if not _is_private(each, may_be_sticky=each != path)]
    except OSError:
        return False
    if refused:
        logger.warning(
            "compiled kernels are not kept: other users may write to %s. Run chmod 700 there if it is yours, or set "
            "NUMBA_CACHE_DIR to a folder of your own",
            refused[0],
        )
    return not refused


def _is_private(folder: Path, *, may_be_sticky: bool) -> bool:
    """Return whether a folder belongs to this user or root, and nobody else can write to it.

    With ``may_be_sticky`` others may add files, as in /tmp, if they cannot rename or delete other users' files.
    """
    # The kernels' own folder must not be a symbolic link, because another user may have made it. A parent directory may
    # be a symbolic link that the user made.
    status = folder.stat(follow_symlinks=may_be_sticky)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.getuid(), 0):
        return False
    return not status.st_mode & 0o022 or (may_be_sticky and bool(status.st_mode & stat.S_ISVTX))


logger = logging.getLogger("dgc")

PATIENCE = 120.0  # seconds that a process waits for another one that compiles, before it compiles as well

_POLL = 0.05  # seconds between two looks at a lock


class BusyError(Exception):
    """Another process of this host is compiling."""


_within = threading.local()


@contextlib.contextmanager
def compiling(what: str, *, part: str = "kernels", patience: float = PATIENCE) -> Iterator[None]:
    """Let one process of the host compile the kernels that the ``with`` block calls, while the others wait.

    A warning is logged before compilation begins. If all kernels are compiled already, nothing is logged and no process
    waits. Inside another block of the same part and thread, this does nothing.

    Args:
        what: a name for the kernels that the block calls. The same name must always mean the same kernels.
        part: "kernels", or another name. Processes may compile different parts at the same time. Only the compilation
            of "kernels" is logged.
        patience: seconds to wait for another process before compiling as well. With 0, :class:`BusyError` is raised if
            another process compiles.
    """
    directory = cache_directory()
    done = Path(directory) / f"compiled-{what}"
    if not usable(directory) or done.exists():
        yield
        return
    within = vars(_within).setdefault("parts", set())
    if part in within:
        yield
        _touch(done)
        return
    with contextlib.ExitStack() as held:
        held.enter_context(_locked(Path(directory) / f"{part}.lock", patience))
        if done.exists():
            held.close()
            yield
            return
        if part == "kernels":
            _tell(directory)
        within.add(part)
        collects = gc.isenabled()
        gc.disable()  # compiling makes millions of objects, and each collection would also visit all of PyTorch's
        try:
            yield
        finally:
            within.discard(part)
            if collects:
                gc.enable()
        _touch(done)


@contextlib.contextmanager
def _locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock of a file in the ``with`` block.

    The block runs without the lock if the file system has no locks, or after ``patience`` seconds: compiling twice does
    no harm. With a patience of 0, raise :class:`BusyError` if another process has the lock.
    """
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file = held.enter_context(path.open("a"))
            while not _lock(file):
                if patience == 0:
                    raise BusyError(path)
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL)
            else:
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked child may hold the same open file
        yield


def _lock(file: IO[str]) -> bool:
    """Lock a file; return False if another process has the lock. Raise OSError if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _tell(directory: str) -> None:
    logger.warning(
        "dgc compiles its kernels for this processor, once, which takes up to half a minute, and keeps them in %s "
        "(python -m dgc compile does it beforehand)",
        directory,
    )


def _touch(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.touch()


def entry(function: F) -> F:
    """Decorate a kernel that Python calls. It is compiled at its first call, or loaded from the cache."""
    directory, before = cache_directory(), numba.config.CACHE_DIR
    if usable(directory):
        numba.config.CACHE_DIR = directory
        try:
            return cast(F, numba.njit(**_OPTIONS, cache=True)(function))
        except RuntimeError:  # the directory cannot be written to after all
            pass
        finally:
            numba.config.CACHE_DIR = before
    return cast(F, numba.njit(**_OPTIONS)(function))


def helper(function: F) -> F:
    """Decorate a function that only kernels call. It is compiled into them."""
    return cast(F, numba.njit(**_OPTIONS, no_cpython_wrapper=True)(function))
