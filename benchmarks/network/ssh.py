"""ssh daemons on the hosts and a client that reaches them, with keys and settings of their own in the lab's folder."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from network.lab import Lab
from network.requirements import LabError, program

PORT = "2222"
OPTIONS = ("--ssh-port", PORT)
KEPT = ("PATH", "LD_LIBRARY_PATH", "OPAL_PREFIX", "DGC_LAB")
"""What of the lab's environment whoever comes by ssh finds."""


def start_daemons(lab: Lab) -> None:
    """Start a daemon on each host, and let the name ssh mean a client with the lab's settings for every process.

    Does nothing where they run.

    Raises:
        LabError: a daemon does not answer.
    """
    folder = lab.folder
    shim = folder / "bin" / "ssh"
    if shim.exists():
        return
    for key in ("host_key", "user_key"):
        subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    kept = " ".join(f'"{name}={lab.environment[name]}"' for name in KEPT if name in lab.environment)
    daemon = {
        "Port": PORT,
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "user_key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "MaxStartups": "100",
        "SetEnv": kept,
    }
    client = {
        "Port": PORT,
        "User": "root",
        "IdentityFile": folder / "user_key",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": folder / "known_hosts",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "no",
        "LogLevel": "ERROR",
    }
    for name, settings in (("sshd_config", daemon), ("ssh_config", client)):
        (folder / name).write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {program("ssh")} -F {folder}/ssh_config "$@"\n')
    shim.chmod(0o755)
    for host in lab.hosts.values():
        # A daemon that stays in the foreground is a child of the lab's: it is pinned, and ends with its host.
        host.start([program("sshd"), "-D", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL)
    lab.environment["PATH"] = f"{shim.parent}:{lab.environment['PATH']}"
    for name in lab.hosts:
        _wait(lab, shim, name)


def _wait(lab: Lab, shim: Path, name: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            lab.run("head", [str(shim), "-o", "ConnectTimeout=2", name, "true"])
        except LabError as error:
            if time.monotonic() > deadline:
                raise LabError(f"the ssh daemon of {name} does not answer: {error}") from None
            time.sleep(0.1)
        else:
            return
