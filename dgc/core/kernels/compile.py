"""How kernels are compiled: without the interpreter lock, and cached on disk.

Imports Numba; only modules that are loaded on first use may import this one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding

SOURCES = ("compile", "cpu", "simd", "sweep", "threads", "threshold")
"""Modules whose functions or constants are compiled into kernels."""


F = TypeVar("F", bound=Callable[..., Any])


@cache
def cache_directory(own: str | None = None) -> str:
    """Where compiled kernels are kept: one directory for each version of the sources and each kind of processor.

    Numba looks for changes only in the file that defines a kernel, not in those of the functions which that kernel
    calls, and its index is not safe when processors of two kinds share a home directory. Naming the directory after
    both makes either harmless. NUMBA_CACHE_DIR, when set, says where this directory is made.

    Args:
        own: the file of kernels that call nothing outside it; None for those of this package.
    """
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__)
    files = [here.parent / f"{name}.py" for name in SOURCES] if own is None else [here, Path(own)]
    for file in files:
        digest.update(file.read_bytes())
    digest.update(f"{numba.__version__} {binding.get_host_cpu_name()}".encode())
    digest.update(repr(sorted(binding.get_host_cpu_features().items())).encode())
    digest.update(f"{os.environ.get('NUMBA_CPU_NAME')} {os.environ.get('NUMBA_CPU_FEATURES')}".encode())
    return str(Path(numba.config.CACHE_DIR or _user_cache()) / f"kernels-{digest.hexdigest()}")


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(base) if base else Path.home() / ".cache"
        (root / "dgc").mkdir(parents=True, exist_ok=True)
        return root / "dgc"
    except (OSError, RuntimeError):
        return Path(tempfile.gettempdir()) / f"dgc-{os.getuid()}"


@cache
def usable(directory: str) -> bool:
    """Whether kernels may be kept there. Left to itself, Numba would go on to a folder that knows no versions."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        # What is found there is run: a folder that another user made first, under a common name, is no good.
        return os.access(directory, os.W_OK) and is_trusted(Path(directory).parent)
    except OSError:
        return False


def is_trusted(path: Path) -> bool:
    """Whether this user, or root, owns the folder or file, so that its content is theirs."""
    return path.stat().st_uid in (os.getuid(), 0)


def entry(own: str | None = None) -> Callable[[F], F]:
    """Decorate a kernel that Python calls: compiled on its first call, taken from the cache after that.

    Args:
        own: as for :func:`cache_directory`.
    """

    def decorate(function: F) -> F:
        if not usable(cache_directory(own)):
            return helper(function)
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = cache_directory(own)
        try:
            return cast(F, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
        except RuntimeError:
            # No directory can be written: kernels are compiled anew in each process.
            return helper(function)
        finally:
            numba.config.CACHE_DIR = before

    return decorate


def helper(function: F) -> F:
    """Decorate a function that only kernels call; it is compiled into them."""
    return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
