"""Counters that a compressor keeps, and what a user reads from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepStats:
    """One step, or the sum over several. Bytes are those this rank handed to (or got from) collectives.

    Attributes:
        bytes_sent: every byte given to a collective, headers, dense tensors and padding included.
        bytes_received: every byte that collectives returned from other ranks.
        dense_bytes: what a dense exchange of the same gradients would have handed to allreduce (4 B an element,
            8 B for float64).
        entries_sent: sparsified entries selected on this rank.
        sparse_elements: elements of the sparsified tensors, those of a dense step included.
        seconds: per phase: "compress", "exchange" and "apply" on the communication thread, "wait" on the caller's.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    entries_sent: int = 0
    sparse_elements: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compress": 0.0, "exchange": 0.0, "apply": 0.0, "wait": 0.0}
    )

    @property
    def ratio(self) -> float:
        """Dense bytes over bytes sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def density(self) -> float:
        """Share of the sparsified tensors' entries that was sent."""
        return self.entries_sent / self.sparse_elements if self.sparse_elements else 0.0

    def add(self, other: StepStats) -> None:
        """Add another record to this one."""
        for name in ("bytes_sent", "bytes_received", "dense_bytes", "entries_sent", "sparse_elements"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the with-block to ``seconds[phase]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for printing and logging."""
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "dense_bytes": self.dense_bytes,
            "ratio": self.ratio,
            "density": self.density,
            "seconds": dict(self.seconds),
        }


@dataclass
class Stats:
    """What ``compression.stats`` shows.

    Attributes:
        steps: steps exchanged, refused ones included.
        refused_steps: steps that met a non-finite value and were taken back.
        last: the latest step.
        total: the sum over all steps since construction or ``reset()``.
    """

    steps: int = 0
    refused_steps: int = 0
    last: StepStats = field(default_factory=StepStats)
    total: StepStats = field(default_factory=StepStats)

    def record(self, step: StepStats, *, refused: bool) -> None:
        """Count one finished step."""
        self.steps += 1
        self.refused_steps += refused
        self.last = step
        self.total.add(step)

    def add_sent(self, count: int) -> None:
        """Add bytes that an adapter handed to collectives of its own in the latest step, e.g. stand-ins."""
        self.last.bytes_sent += count
        self.total.bytes_sent += count

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for printing and logging."""
        return {
            "steps": self.steps,
            "refused_steps": self.refused_steps,
            "last": self.last.as_dict(),
            "total": self.total.as_dict(),
        }
