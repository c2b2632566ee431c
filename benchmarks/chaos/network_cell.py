"""One job between the hosts of a lab: started, hurt, watched; and a new one that goes on from its last checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from cell import RANKS, Found, await_marks, first_error, read_line, shorten, verdict_of, wait
from faults import Fault
from launch_tools import environment_for
from network.lab import Lab
from network.launch import command
from network.processes import of_lab
from network_faults import CUT, NETWORK_FAULTS, RATE, SLOW

HERE = Path(__file__).resolve().parent
HURT = "host2"
LINGER_SECONDS = 20.0
"""What a host that is cut off still does is its own daemon's business, which finds out by itself."""
OURS = ("network_rank.py", "orted", "mpirun", "horovod")

_labs: set[Lab] = set()
_ending = threading.Event()


@dataclass
class HostFound(Found):
    """What a job did, and the one after it.

    Attributes:
        resumed: the number of steps that a new job found in the last checkpoint; None where there was no new job.
        resumed_digests: of each rank's parameters at that job's end.
    """

    resumed: int | None = None
    resumed_digests: list[str] | None = None


def run_cell(way: str, launcher: str, fault: str, limit: float) -> dict[str, Any]:
    """Run one job, and if it did not come to its end a new one; nothing of them is there afterwards.

    Args:
        way: "A", "B" or "dense".
        launcher: "mpirun" or "gloo".
        fault: a name in ``NETWORK_FAULTS``.
        limit: seconds after the fault after which a job counts as hung.
    """
    found = HostFound(way, launcher, fault)
    folder = Path(tempfile.mkdtemp(prefix="net-", dir="/tmp"))
    try:
        _run(found, NETWORK_FAULTS[fault], folder, limit)
        found.digests = _digests(folder)
        found.verdict = verdict_of(found, NETWORK_FAULTS[fault], folder)
        if not all(found.digests):
            _go_on(found, folder, limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return asdict(found)


def end_all() -> None:
    """End the jobs under way, whichever threads have started them; no other begins."""
    _ending.set()
    for lab in list(_labs):
        lab.close()


def is_ending() -> bool:
    """Whether :func:`end_all` was called: what a job does then says nothing."""
    return _ending.is_set()


def _run(found: Found, fault: Fault, folder: Path, limit: float) -> None:
    with Lab(RANKS, RATE, launcher=found.launcher) as lab, (folder / "output").open("w+") as output:
        _labs.add(lab)
        if is_ending():
            return
        job = _start(lab, found, fault, folder, output)
        begun = _hurt(lab, fault, folder, job)
        found.status = wait(job, begun + limit)
        found.seconds = round(time.monotonic() - begun, 1)
        if found.status is None:
            found.stacks = _stacks(lab, folder)
        else:
            found.left = _left(lab)
        output.seek(0)
        found.output = shorten(output.read())
        _labs.discard(lab)
    found.reads = first_error(found.output) if found.status != 0 else ""


def _go_on(found: HostFound, folder: Path, limit: float) -> None:
    """A new job on two hosts that are well."""
    for path in folder.glob("*.*"):
        path.unlink()
    again = Found(found.way, found.launcher, "none")
    _run(again, NETWORK_FAULTS["none"], folder, limit)
    begun = read_line(folder / "begun.0", 1)
    found.resumed = int(begun) if begun else None
    found.resumed_digests = _digests(folder)
    if not all(found.resumed_digests):
        found.output += f"\n---- the new job\n{again.output}"


def _start(lab: Lab, found: Found, fault: Fault, folder: Path, output: Any) -> subprocess.Popen[str]:
    job = command(
        lab, [sys.executable, str(HERE / "network_rank.py"), found.way, fault.name, str(folder)], found.launcher
    )
    own = {name: value for name, value in lab.environment.items() if os.environ.get(name) != value}
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = environment_for({**own, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", **fault.environment})
    return lab.start(
        "head",
        job,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _hurt(lab: Lab, fault: Fault, folder: Path, job: subprocess.Popen[str]) -> float:
    """Wait until the fault has happened, or let it happen; the time of it."""
    inside = fault.where not in ("", "network")
    marked = await_marks(job, folder, inside)
    begun = time.monotonic()
    if inside or marked is None:
        return marked or begun
    if fault.name == "link_short":
        lab.link_down(HURT, CUT)
    elif fault.name.startswith("link_down"):
        lab.link_down(HURT)
    elif fault.name == "slow":
        lab.rate(HURT, SLOW)
    elif fault.name.startswith("kill_host"):
        lab.kill_host(HURT)
    return begun


def _left(lab: Lab) -> list[str]:
    """Processes of the job that are there some seconds after the launcher's end."""
    deadline = time.monotonic() + LINGER_SECONDS
    while (alive := _processes(lab)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"process {name}" for name in alive.values()]


def _processes(lab: Lab) -> dict[int, str]:
    """The last words of the command lines of the job's processes, by number."""
    found = {}
    for pid in of_lab(str(lab.folder)):
        try:
            words = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        if any(name in words for name in OURS):
            found[pid] = words[-60:]
    return found


def _stacks(lab: Lab, folder: Path) -> str:
    """Where the ranks hang, in Python."""
    for pid in _processes(lab):
        words = psutil.Process(pid).cmdline()
        if len(words) > 1 and words[1].endswith("network_rank.py"):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(path.read_text() for path in sorted(folder.glob("stacks.*")))


def _digests(folder: Path) -> list[str]:
    return [read_line(folder / f"finished.{rank}", 1) for rank in range(RANKS)]
