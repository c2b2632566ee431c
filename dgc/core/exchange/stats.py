"""The counters of an exchange, which users read in ``compression.stats``."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

_COUNTS = ("bytes_sent", "bytes_received", "dense_bytes", "entries_sent", "sparse_elements", "small_bytes")
_SECONDS = {"compress": 0.0, "exchange": 0.0, "apply": 0.0, "wait": 0.0, "write": 0.0}


@dataclass
class StepStats:
    """This rank's counters of one step, or their sum over several steps.

    Attributes:
        bytes_sent: all bytes given to collectives, with headers, dense tensors and padding.
        bytes_received: all bytes that collectives returned from other ranks.
        dense_bytes: bytes that a dense exchange would have given to allreduce for the same gradients (4 per element, 8
            for float64).
        entries_sent: sparsified entries that this rank has selected.
        sparse_elements: elements of the sparsified tensors, counted in dense steps, too.
        small_bytes: the part of ``bytes_sent`` for tensors that were sent dense in a sparsified step.
        seconds: by phase: "compress", "exchange" and "apply" (adding up) on the communication thread, "wait" and
            "write" (the results) on the caller's.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    entries_sent: int = 0
    sparse_elements: int = 0
    small_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=_SECONDS.copy)

    @property
    def ratio(self) -> float:
        """Dense bytes divided by bytes sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def density(self) -> float:
        """The share of the sparsified tensors' entries that was sent."""
        return self.entries_sent / self.sparse_elements if self.sparse_elements else 0.0

    def add(self, other: StepStats) -> None:
        """Add the counters of ``other`` to these."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def count_collective(self, nbytes: int) -> None:
        """Count a collective that sends and receives ``nbytes``."""
        self.bytes_sent += nbytes
        self.bytes_received += nbytes

    def lap(self, phase: str, since: float) -> float:
        """Count the seconds since ``since``, a time of ``perf_counter()``; return the time now."""
        now = time.perf_counter()
        self.seconds[phase] += now - since
        return now

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for printing and logging."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "density": self.density}


@dataclass
class Stats:
    """The object ``compression.stats``.

    Attributes:
        steps: the number of exchanged steps, also refused ones.
        refused_steps: the number of steps that met a value that is not finite.
        last: the latest step's counters.
        total: the sum over all steps since construction or ``reset()``, with what ``average()`` has sent.
        beside: bytes that an adapter gives to its own collectives in the current step, for example placeholders.
    """

    steps: int = 0
    refused_steps: int = 0
    last: StepStats = field(default_factory=StepStats)
    total: StepStats = field(default_factory=StepStats)
    beside: int = 0

    def record(self, step: StepStats, *, refused: bool) -> None:
        """Count one finished step."""
        self.steps += 1
        self.refused_steps += refused
        step.bytes_sent += self.beside
        self.beside = 0
        self.last = step
        self.total.add(step)

    def add_sent(self, count: int) -> None:
        """Add ``count`` bytes to the latest step. An adapter has sent them with its own collectives."""
        self.last.bytes_sent += count
        self.total.bytes_sent += count

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for printing and logging."""
        counts = {"steps": self.steps, "refused_steps": self.refused_steps}
        return {**counts, "last": self.last.as_dict(), "total": self.total.as_dict()}
