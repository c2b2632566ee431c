"""The members of a trainer, and what a run has to say of itself while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evidence.application import Application
from evidence.variants import Variant


@dataclass(frozen=True)
class Task:
    """What is to be trained."""

    application: Application
    variant: Variant
    folder: Path
    """Of the run's checkpoint."""


Record = list[dict[str, Any]]
"""One entry an epoch: its number, mean training loss, metrics, bytes sent, seconds."""

EndOfEpoch = Callable[[int, float], None]
"""Called on all ranks after an epoch, with its number and this rank's mean training loss."""


class Trainer(Protocol):
    """A model on this rank, its optimizer, and what saves them. All members are called on all ranks together."""

    rank: int
    size: int
    device: str
    """"cpu", or what a GPU is called."""

    def __init__(self, task: Task) -> None:
        """Build model and optimizer, equal on all ranks."""
        ...

    def resume(self) -> Record:
        """Take up the run's checkpoint, if there is one; returns the record of the epochs it has made."""
        ...

    def run(self, first: int, end_of_epoch: EndOfEpoch) -> None:
        """Train the epochs from ``first`` on."""
        ...

    def evaluate(self) -> dict[str, float]:
        """The application's metrics of all held-out data, equal on all ranks."""
        ...

    def sums(self, values: list[float]) -> list[float]:
        """Each value added up over the ranks, in float64."""
        ...

    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to collectives for its gradients since it was built."""
        ...

    def save(self, record: Record) -> None:
        """Replace the run's checkpoint by the present state, whole or not at all."""
        ...

    def summary(self) -> dict[str, Any]:
        """Parameters, how many are sparsified, and whether all ranks ended with the same."""
        ...


def add_up(trainer: Trainer, application: Application, own: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The metrics of all ranks' shares.

    Args:
        trainer: adds up over the ranks.
        application: whose metrics.
        own: what ``evaluate`` returned here: every metric's (sum, count).
    """
    sums = trainer.sums([number for metric in application.metrics for number in own[metric.name]])
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return {m.name: m.value(total, count) for m, (total, count) in zip(application.metrics, pairs, strict=True)}
