"""What one training step hands to its buckets, and what they leave behind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.errors import DGCError
from dgc.core.kernels.base import Kept
from dgc.core.layout import Segment


@dataclass(slots=True)
class Submission:
    """One parameter's gradient of this step, and where its result goes. All arrays are 1-D and contiguous.

    ``result`` may be the gradient's own memory: it is written after the gradient was read for the last time.
    ``limit`` is the largest finite value of the type that the result will be cast to, if that is a narrower one.
    ``ready`` is for arrays on a device: an event after which they may be read, with its CUDA handle as ``handle``.
    """

    gradient: np.ndarray
    result: np.ndarray
    parameter: np.ndarray | None = None
    limit: float | None = None
    ready: Any = None


@dataclass(slots=True)
class Hyper:
    """Momentum, Nesterov and weight decay by parameter, as they are in this step.

    The core does not use learning rates; the ranks must share them.
    """

    momentum: list[float]
    nesterov: list[bool]
    weight_decay: list[float]
    learning_rates: tuple[float, ...] = ()
    """Of the optimizer's parameter groups, where the adapter knows them."""
    restored: bool = False
    """Whether residuals and momentum were dropped before this step, since a state was loaded into the optimizer."""

    def digest(self) -> int:
        """64-bit digest of all values; of learning rates 6 digits, which unlike machines compute alike."""
        table = np.array([self.momentum, self.nesterov, self.weight_decay], dtype=np.float64)
        rates = " ".join(f"{rate:.5e}" for rate in self.learning_rates).encode() + b" restored" * self.restored
        return int.from_bytes(hashlib.blake2b(table.tobytes() + rates, digest_size=8).digest(), "little")

    @classmethod
    def uniform(cls, count: int, config: DGCConfig) -> Hyper:
        """The config's values for every parameter; what is None there is 0."""
        return cls(
            [config.momentum or 0.0] * count,
            [bool(config.nesterov)] * count,
            [config.weight_decay or 0.0] * count,
        )


@dataclass(slots=True)
class StepContext:
    """What all buckets of one step share. ``density`` is None in a dense step."""

    step: int
    density: float | None
    hyper: Hyper
    loss_scale: float
    fingerprint: int
    """What all ranks must share in this step: layout, momentum, Nesterov, weight decay and learning rates."""
    clip: list[float] | None = None


@dataclass(slots=True)
class Outcome:
    """What a bucket leaves behind for the end of the step."""

    flagged: bool = False
    kept: Kept | None = None


class RemoteFailure(Exception):
    """Another rank (or this one) sent an error instead of a message."""

    def __init__(self, error: DGCError) -> None:
        """Wrap the error to raise to the user."""
        super().__init__(str(error))
        self.error = error


def submitted(given: Sequence[Submission | None], segment: Segment) -> Submission:
    """What was handed over for a segment of a bucket that runs."""
    item = given[segment.parameter]
    assert item is not None, "a bucket runs only when all its gradients are in"
    return item
