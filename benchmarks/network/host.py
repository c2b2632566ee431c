"""One host: namespaces of its own for network, processes, mounts and name, held by one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network import processes
from network.requirements import LabError, program

DEVICE = "eth0"
"""The network interface of every host, and of the head."""


def dying_with_us(command: Sequence[str]) -> list[str]:
    """``command``, killed by the kernel when this process ends, however it ends."""
    return [program("setpriv"), "--pdeathsig", "KILL", *command]


class Host:
    """A host of the lab.

    Args:
        name: its host name, which every other host can resolve.
        address: its IPv4 address.
        folder: of the lab.
        environment: of its processes.
        cores: which of the machine's cores its processes may use; None: all.
        own_processes: False for the head, from where jobs are started: it sees the machine's processes.
    """

    def __init__(
        self,
        name: str,
        address: str,
        folder: Path,
        environment: dict[str, str],
        cores: Sequence[int] | None = None,
        own_processes: bool = True,
    ) -> None:
        self.name, self.address, self.cores = name, address, cores
        self._environment = environment
        namespaces = ["--net", "--uts", "--mount", *(("--pid", "--mount-proc") if own_processes else ())]
        self._entered = ["--net", "--uts", "--mount", *(("--pid",) if own_processes else ())]
        holder = [sys.executable, "-I", "-S", str(Path(__file__).with_name("holder.py")), name, str(folder)]
        self._process = subprocess.Popen(
            dying_with_us([program("unshare"), *namespaces, "--fork", "--kill-child", *holder]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            _, error = self._process.communicate()
            raise LabError(f"{name} did not come up: {error.strip()}")
        (self.pid,) = processes.children(self._process.pid)

    def entering(self, command: Sequence[str], folder: str | None = None) -> list[str]:
        """``command`` as it is run on this host from outside, in ``folder`` (by default where we are)."""
        pinned = [] if self.cores is None else [program("taskset"), "-c", ",".join(map(str, self.cores))]
        enter = [program("nsenter"), "--target", str(self.pid), *self._entered]
        # Whoever enters other mounts stands at their root.
        return [*enter, "env", f"--chdir={folder or os.getcwd()}", *pinned, *command]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process on this host."""
        options = {"env": self._environment, "text": True, **options}
        return subprocess.Popen(dying_with_us(self.entering(command)), **options)

    def call(self, command: Sequence[str], given: str | None = None) -> str:
        """Run a command on this host; returns what it printed.

        Raises:
            LabError: it failed.
        """
        done = subprocess.run(
            self.entering(command), env=self._environment, input=given, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = f"\n{given}" if given else ""
            raise LabError(f"`{' '.join(command)}` on {self.name} failed: {done.stderr.strip()}{lines}")
        return done.stdout

    @property
    def alive(self) -> bool:
        """Whether the host is up."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the host and all its processes at once."""
        processes.kill([self.pid])
        self._process.kill()
        self._process.communicate()
