"""How kernels are compiled: without the interpreter lock, and cached on disk.

Imports Numba; only modules that are loaded on first use may import this one.
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

# Of all that is compiled: no pointer to a C function of each kernel, which nobody takes and which costs time.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


@cache
def cache_directory() -> str:
    """Where compiled kernels are kept: one directory for each version of the sources and each kind of processor.

    Numba looks for changes only in the file that defines a kernel, not in those of the functions which that kernel
    calls, and its index is not safe when processors of two kinds share a home directory. Naming the directory after
    both makes either harmless. NUMBA_CACHE_DIR, when set, says where this directory is made.
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
    """Whether kernels may be kept in a directory, which is made if it is missing.

    Numba's index of a kernel is a pickle, which may run any code. So the directory is used only if no other user can
    write to it or put another one in its place.
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
    """Whether a folder is this user's or root's, and nobody else can write to it.

    With ``may_be_sticky`` others may add to it, as to /tmp, if they cannot rename or delete what is not theirs.
    """
    # Another user may have made the folder for kernels as a link. A parent may be the user's own link.
    status = folder.stat(follow_symlinks=may_be_sticky)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.getuid(), 0):
        return False
    return not status.st_mode & 0o022 or (may_be_sticky and bool(status.st_mode & stat.S_ISVTX))


logger = logging.getLogger("dgc")

# Seconds that a process waits for another one to compile, before it compiles as well.
PATIENCE = 120.0

_POLL = 0.05  # seconds between two looks at a lock


class BusyError(Exception):
    """Another process of this host compiles now."""


_within = threading.local()


@contextlib.contextmanager
def compiling(what: str, *, part: str = "kernels", patience: float = PATIENCE) -> Iterator[None]:
    """Inside, kernels are called for the first time: of the processes of a host, one compiles and the others wait.

    That one says so in the log, as a warning, before it begins. Where all of it was compiled before, nothing waits and
    nothing is said. Within another one of the same part and thread it does nothing.

    Args:
        what: names what is compiled inside; with the same name always the same.
        part: one process compiles the "kernels" while another one compiles something else; only the first says so.
        patience: seconds to wait for another process. With 0, :class:`BusyError` is raised where one compiles;
            after any others this process compiles as well.
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
        gc.disable()  # compiling makes millions of objects that stay, and would look through all of PyTorch's with them
        try:
            yield
        finally:
            within.discard(part)
            if collects:
                gc.enable()
        _touch(done)


@contextlib.contextmanager
def _locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock of a file.

    Without it where the file system has no locks, and after ``patience`` seconds: compiling twice does no harm. Where
    these are 0, raises :class:`BusyError`.
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
    """Lock a file, unless another process has; OSError where there are no locks."""
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
    """Decorate a kernel that Python calls: compiled on its first call, taken from the cache after that."""
    directory, before = cache_directory(), numba.config.CACHE_DIR
    if usable(directory):
        numba.config.CACHE_DIR = directory
        try:
            return cast(F, numba.njit(**_OPTIONS, cache=True)(function))
        except RuntimeError:  # no directory can be written after all
            pass
        finally:
            numba.config.CACHE_DIR = before
    return cast(F, numba.njit(**_OPTIONS)(function))


def helper(function: F) -> F:
    """Decorate a function that only kernels call; it is compiled into them."""
    return cast(F, numba.njit(**_OPTIONS, no_cpython_wrapper=True)(function))
