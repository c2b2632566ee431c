"""The user's cache of wheels: one entry for all that determines a wheel."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from dgc.build_horovod.process import BuildError, say
from dgc.build_horovod.sources import EDITS, HOROVOD_VERSION, SDIST_SHA256, Edit
from dgc.build_horovod.toolchain import Toolchain

RECIPE = 1  # raised when the way of building changes: older wheels in a cache are then not used

# A user's own choices for the build (NCCL, CUDA, compiler flags, ...) are passed on and become part of the cache key.
BUILD_VARIABLES = (
    "HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_BUILD", "HOROVOD_CPU_OPERATIONS", "HOROVOD_CUDA", "HOROVOD_GPU",
    "HOROVOD_NCCL", "HOROVOD_ROCM", "HOROVOD_WITH",
)  # fmt: skip
COMPILER_FLAGS = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")


def user_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the environment that steer Horovod's build."""
    flags = {name: environ[name] for name in COMPILER_FLAGS if environ.get(name, "").strip()}
    return flags | {name: value for name, value in environ.items() if name.startswith(BUILD_VARIABLES)}


def recipe_digest(edits: tuple[Edit, ...], options: Mapping[str, str]) -> str:
    """Return eight hex digits that change with the edits, the build options and the recipe."""
    parts = [str(RECIPE), SDIST_SHA256]
    parts += [f"{e.path}\0{e.old}\0{e.new}" for e in edits]
    parts += [f"{name}={value}" for name, value in sorted(options.items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def cache_key(tools: Toolchain, options: Mapping[str, str], edits: tuple[Edit, ...] = EDITS) -> str:
    """Return the name of the cache entry: every version the wheel depends on, and a digest of all else.

    No file of this package is hashed: what such a file does to a wheel, the edits and ``RECIPE`` say.
    """
    inputs = dict(options)
    if tools.mpicxx and not tools.mpi_in_environment:
        inputs["mpicxx"] = str(tools.mpicxx)  # the wheel's run paths then point to that installation
    parts = [
        f"horovod{HOROVOD_VERSION}",
        f"py{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}",
        f"torch{tools.torch}" if tools.torch else "",
        f"tf{tools.tensorflow}" if tools.tensorflow else "",
        tools.mpi or "nompi",
        "env" if tools.mpi_in_environment else "",
        sysconfig.get_platform().replace("-", "_"),
        recipe_digest(edits, inputs),
    ]
    return "-".join(part for part in parts if part)


def default_cache() -> Path:
    """Return the user's cache directory for these wheels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-dgc"


def cached_wheel(entry: Path) -> Path | None:
    """Return the wheel of a cache entry, if it is there."""
    return next(entry.glob("horovod-*.whl"), None) if entry.is_dir() else None


def wider_wheel(cache: Path, tools: Toolchain, options: Mapping[str, str]) -> Path | None:
    """Return a wheel that was built for the same tools and for a framework that this environment lacks."""
    anything = replace(tools, torch=tools.torch or "*", tensorflow=tools.tensorflow or "*")
    wheels = map(cached_wheel, sorted(cache.glob(cache_key(anything, options))))
    return next(filter(None, wheels), None)


@contextlib.contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Make a cache entry if need be and hold its lock, waiting while another process builds the same wheel.

    Raises:
        BuildError: the entry cannot be written.
    """
    try:
        entry.mkdir(parents=True, exist_ok=True)
        file = (entry / "lock").open("w")
    except OSError as error:
        raise BuildError(f"The cache cannot be written: {error}\nChoose another directory with --cache-dir.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process builds the same wheel: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
