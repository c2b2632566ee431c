"""Seconds of the processor by thread, as /proc shows them, under the names of what the threads are for."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

TASKS = Path("/proc/self/task")


def numbers() -> set[int]:
    """All threads of this process."""
    return {int(entry.name) for entry in TASKS.iterdir()}


class Threads:
    """Knows whose each thread is: the main thread's, of Python's threads by their names, or of whom it was told."""

    def __init__(self) -> None:
        self._known = {os.getpid(): "main"}
        self._before = numbers()

    def new(self, first: str, others: str) -> None:
        """Name the threads that came since the last call: the oldest of them, and all others."""
        came = sorted(numbers() - self._before)
        self._known.update({number: others if i else first for i, number in enumerate(came)})
        self._before |= set(came)

    def seconds(self) -> dict[str, float]:
        """Seconds of the processor since each thread began, summed by name."""
        python = {t.native_id: t.name for t in threading.enumerate() if t is not threading.main_thread()}
        total: dict[str, float] = defaultdict(float)
        for number in numbers():
            try:
                name = (TASKS / str(number) / "comm").read_text().strip()
                spent = int((TASKS / str(number) / "schedstat").read_text().split()[0]) / 1e9
            except OSError:
                continue
            total[python.get(number) or self._known.get(number) or name] += spent
        return dict(total)
