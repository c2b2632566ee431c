"""One rank of a job in the matrix of chaos, for the training loops that ``matrix.py`` starts with a command line.

    torch_ways.py WAY FAULT FOLDER
    tensorflow_ways.py WAY FAULT FOLDER

It leaves a file in FOLDER at each moment that the process which started it waits for.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from faults import FAULTS, STEP, STEPS, TEXT, VICTIM, Fault

PAUSE = 0.02
"""Seconds of a step."""


class Rank:
    """What a training loop of either framework calls at each place of a step.

    Attributes:
        number: this rank.
        folder: of the job.
        fault: what goes wrong.
        steps: how many steps this rank makes.
        told: whether a SIGTERM has come.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        """Nothing has happened yet. Horovod is asked later, when it is initialised."""
        self.fault, self.folder = fault, folder
        self.number, self.step, self.steps, self.told = -1, -1, STEPS, False

    def initialised(self, number: int) -> None:
        """Horovod is there, and this process is rank ``number``."""
        self.number = number
        self.mark("pid", str(os.getpid()))
        if self.fault.where == "outside":
            self.steps = 3000
        if self.fault.where == "length" and number == VICTIM:
            self.steps += 1 if self.fault.name == "one_more" else -1
        if self.fault.wanted == "saves" or self.fault.name == "save_alone":
            signal.signal(signal.SIGTERM, self._hear)

    def wraps(self) -> None:
        """Its optimizer is made, and about to be wrapped."""
        self.happen("start")

    def begin(self, step: int) -> None:
        """A step begins, counted from 0."""
        self.step = step
        if step == STEP:
            self.mark("ready", "\n".join(_shared_memory()))
        time.sleep(PAUSE)
        if self.fault.where == "length" and step == STEPS - 2:
            self.mark("fault")
        if step == STEP:
            self.happen("begin")

    def at(self, place: str) -> None:
        """A step has come to a place: "forward", "backward" or "update"."""
        if self.step == STEP:
            self.happen(place)

    def finished(self, parameters: list[Any]) -> None:
        """All steps are made.

        Args:
            parameters: arrays of the trained model.
        """
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parameters))
        self.mark("finished", digest.hexdigest()[:16])

    def saved(self) -> None:
        """The checkpoint is complete for this rank."""
        self.mark("saved")

    def mark(self, what: str, text: str = "") -> None:
        """Leave a file with the time of the machine's clock in its first line."""
        path = self.folder / f"{what}.{self.number}"
        unfinished = path.with_name(f"{path.name}.new")
        unfinished.write_text(f"{time.monotonic()}\n{text}")
        unfinished.rename(path)

    def _hear(self, *_: Any) -> None:
        self.told = True

    def happen(self, place: str) -> None:
        """Let the fault happen, if this is its place and its rank."""
        if place != self.fault.where or self.number != VICTIM:
            return
        self.mark("fault")
        name = self.fault.name
        if name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name.startswith("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name.startswith("raise"):
            raise ValueError(TEXT)
        elif name.startswith("exit"):
            sys.exit(int(name[-1]))
        elif name == "fork":
            if os.fork() == 0:
                sys.exit(0)
        elif name.startswith("memory"):
            _end_address_space()


def _shared_memory() -> list[str]:
    """Files under /dev/shm that this process has mapped."""
    found = re.findall(r"(/dev/shm/\S+)$", Path("/proc/self/maps").read_text(), re.M)
    return sorted(set(found))


def _end_address_space() -> None:
    """Leave this process what it has, and two megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 2**21
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(train: Callable[[str, Rank], None]) -> None:
    """Call a training loop with the way and the rank that the command line names."""
    way, fault, folder = sys.argv[1:]
    train(way, Rank(FAULTS[fault], Path(folder)))
