"""The command that starts a job on a lab's hosts, from its head."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from network import ssh
from network.host import DEVICE
from network.lab import Lab
from network.requirements import LabError, program

LAUNCHERS = ("mpirun", "horovodrun", "gloo")
PRIORITY = 30
BETWEEN = {"pml": "ob1", "btl_tcp_if_include": DEVICE, "oob_tcp_if_include": DEVICE}


def command(
    lab: Lab, job: Sequence[str], launcher: str = "mpirun", ranks_each: int = 1, real_time: bool = False
) -> list[str]:
    """``job`` on all hosts of ``lab``, to be started by ``lab.start("head", ...)``.

    Args:
        lab: made with the same launcher.
        job: a program and its arguments, one process a rank.
        launcher: "mpirun", "horovodrun" (with MPI) or "gloo" (``horovodrun --gloo``), the last two over ssh.
        ranks_each: ranks of each host.
        real_time: the ranks go before every other process of the machine. (Not the launcher with them: on a busy
            machine MPI's daemons then took all cores for minutes, and no rank came up.)
    """
    if real_time:
        _stay_reachable()
        job = [program("chrt"), "--fifo", str(PRIORITY), *job]
    hosts = ",".join(f"{name}:{ranks_each}" for name in lab.hosts)
    ranks = str(len(lab.hosts) * ranks_each)
    if launcher == "mpirun":
        return [*_mpirun(lab, hosts, ranks, ranks_each), *job]
    if launcher not in LAUNCHERS:
        raise LabError(f"launcher must be one of {', '.join(LAUNCHERS)}, not {launcher!r}")
    ssh.start_daemons(lab)
    arguments = ["-np", ranks, "-H", hosts, "--network-interfaces", DEVICE, "--disable-cache", *ssh.OPTIONS]
    # Horovod chooses pml and btl_tcp_if_include itself.
    more = ["--gloo"] if launcher == "gloo" else ["--mpi", f"--mpi-args=--mca oob_tcp_if_include {DEVICE}"]
    return [program("horovodrun"), *arguments, *more, *job]


def _mpirun(lab: Lab, hosts: str, ranks: str, ranks_each: int) -> list[str]:
    agent = Path(__file__).with_name("agent.sh")
    for name, host in lab.hosts.items():
        enter = " ".join(map(shlex.quote, host.entering(["sh", "-c"])))
        (lab.folder / f"{name}.enter").write_text(f'exec {enter} "$*"\n')
    settings = {
        "plm_rsh_agent": f"/bin/sh {shlex.quote(str(agent))}",
        # All hosts are started from the head: from within another host none can be entered.
        "plm_rsh_no_tree_spawn": "1",
        "btl": "tcp,self" if ranks_each == 1 else "tcp,self,vader",
        **BETWEEN,
    }
    mca = [part for name, value in settings.items() for part in ("--mca", name, value)]
    return [program("mpirun"), "-np", ranks, "--host", hosts, "--bind-to", "none", "--map-by", "slot", *mca]


def _stay_reachable() -> None:
    """Let this process, which only waits, go before the ranks, so that a signal still ends them."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY + 1))
