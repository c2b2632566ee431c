"""Compile Horovod's wheel."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dgc.build_horovod.process import run_logged
from dgc.build_horovod.relocation import make_relocatable
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
