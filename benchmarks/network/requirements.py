"""What the lab needs, and what of it is missing here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
    "chrt": "util-linux",
    "mount": "mount",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
BASE = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset", "chrt", "mount")
SSH = ("ssh", "ssh-keygen", "sshd")

TRIAL = """
ip link add b0 type bridge
ip link add v0 type veth peer name v1
tc qdisc add dev v0 root tbf rate 1gbit burst 20kb limit 1mb
"""
"""Run in namespaces of its own, with which all of it vanishes."""


class LabError(RuntimeError):
    """The lab cannot be built, or something in it failed; the message says what to do."""


def search_path() -> str:
    """Where programs are looked for: this Python's folder, PATH, and the folders of the administrator."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def program(name: str) -> str:
    """The path of a program.

    Raises:
        LabError: it is not installed.
    """
    found = shutil.which(name, path=search_path())
    if found is None:
        package = PACKAGES.get(name)
        how = f": install it (Debian, Ubuntu: apt install {package})" if package else " on PATH"
        raise LabError(f"the lab needs {name}, which is not installed{how}")
    return found


def missing(launcher: str = "mpirun") -> str | None:
    """One line that says what this machine lacks for a lab with ``launcher``, or None."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux: it is made of network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root, to make network namespaces: run the same command as root (sudo)"
    try:
        for name in (*BASE, *(() if launcher == "mpirun" else (*SSH, "horovodrun"))):
            program(name)
    except LabError as error:
        return str(error)
    small = [program("unshare"), "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-ec", TRIAL]
    tried = subprocess.run(small, capture_output=True, text=True, env={**os.environ, "PATH": search_path()})
    if tried.returncode != 0:
        said = " ".join(tried.stderr.split())
        return f"the lab needs namespaces with bridges, veth and tbf; the kernel or a container refuses them: {said}"
    return None


def require(launcher: str = "mpirun") -> None:
    """Refuse to go on where something is missing.

    Raises:
        LabError: in one line, with what to do.
    """
    problem = missing(launcher)
    if problem is not None:
        raise LabError(problem)
