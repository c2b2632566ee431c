"""One training step: the caller's gradients and options, and the data that all buckets share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.exchange.stats import StepStats
from dgc.core.layout import Layout, Segment
from dgc.core.state import State
from dgc.errors import ConfigError, LayoutError


@dataclass(slots=True)
class Submission:
    """One parameter's gradient of this step, and the array for its result. All arrays are 1-D and contiguous.

    Attributes:
        gradient: the gradient, or zeros if it is ``absent``.
        result: the result. It may share the gradient's memory, because it is written after the gradient's last use.
        parameter: the parameter's values, if its weight decay is not 0.
        limit: the largest finite value of the type that the result will be cast to, if that type is narrower.
        ready: for arrays on a device. ``stream`` (comparable) is the stream on which they are computed. ``record()``
            returns an event that follows all work enqueued there; its attribute ``handle`` is its CUDA handle.
        absent: whether this rank has no gradient.
    """

    gradient: np.ndarray
    result: np.ndarray
    parameter: np.ndarray | None = None
    limit: float | None = None
    ready: Any = None
    absent: bool = False


class Submissions(dict[int, Submission]):
    """The gradients of one step by parameter, as they arrive. The caller holds the exchange's lock.

    Attributes:
        missing: for each bucket, the number of gradients that have not arrived.
        absent: the parameters without a gradient on this rank.
        events: for each complete bucket, the events to wait for before a device reads its gradients.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self.missing = [len(b.segments) for b in layout.buckets]
        self.absent: set[int] = set()
        self.events: dict[int, list[Any]] = {}

    def of(self, segments: Sequence[Segment]) -> list[Submission]:
        """Return the submissions for some segments of a complete bucket."""
        return [self[segment.parameter] for segment in segments]

    def results(self, segments: Sequence[Segment]) -> list[Any]:
        """Return the arrays for the results of some segments."""
        return [self[segment.parameter].result for segment in segments]

    def add(self, parameter: int, item: Submission) -> bool:
        """Add a submission; return whether it completes its bucket."""
        if parameter in self:
            raise LayoutError(
                f"the gradient of {self._layout.parameters[parameter].name!r} was given twice in one step; call "
                "synchronize() or step() after each backward pass, or set backward_passes_per_step"
            )
        self[parameter] = item
        bucket, _ = self._layout.places[parameter]
        if item.absent:
            self.absent.add(parameter)
        completes = self.missing[bucket] == 1
        if completes and item.ready is not None:
            # One event per stream is enough: it follows all work that was enqueued on the stream before.
            members = self.of(self._layout.buckets[bucket].segments)
            streams = {m.ready.stream: m.ready for m in members if m.ready is not None}
            self.events[bucket] = [ready.record() for ready in streams.values()]
        self.missing[bucket] -= 1  # at the end, because the communication thread reads it without the lock
        return completes


@dataclass(slots=True)
class Hyper:
    """Momentum, Nesterov and weight decay in one step, by parameter.

    The core does not use learning rates, but requires that they are equal on all ranks.

    Attributes:
        gain: a clipped gradient is multiplied by this before it is added to u: 1, or less if u is a running mean.
        learning_rates: those of the optimizer's parameter groups, if the adapter knows them.
        restored: whether residuals and momentum were dropped before this step, because a state was loaded into the
            optimizer.
        absent: the parameters that must have a gradient on no rank in this step.
    """

    momentum: list[float]
    nesterov: list[bool]
    weight_decay: list[float]
    gain: list[float]
    learning_rates: tuple[float, ...] = ()
    restored: bool = False
    absent: tuple[int, ...] = ()

    def chosen(self, indices: Iterable[int], learning_rates: tuple[float, ...] = (), restored: bool = False) -> Hyper:
        """Return the options of the parameters ``indices``, in this order, with the given values for the step."""
        places = list(indices)
        momentum, nesterov = list(map(self.momentum.__getitem__, places)), list(map(self.nesterov.__getitem__, places))
        decay, gain = list(map(self.weight_decay.__getitem__, places)), list(map(self.gain.__getitem__, places))
        return Hyper(momentum, nesterov, decay, gain, learning_rates, restored)

    def digest(self) -> int:
        """Return a 64-bit digest of all values.

        Learning rates count with 6 digits only, because different processors may compute different last digits.
        """
        table = np.array([self.momentum, self.nesterov, self.weight_decay, self.gain], dtype=np.float64)
        rates = " ".join(map("{:.5e}".format, self.learning_rates)).encode() + b" restored" * self.restored
        absent = repr(self.absent).encode() if self.absent else b""
        return int.from_bytes(hashlib.blake2b(table.tobytes() + rates + absent, digest_size=8).digest(), "little")

    @classmethod
    def uniform(cls, count: int, config: DGCConfig) -> Hyper:
        """Return the config's values for every parameter, with 0 in place of None."""
        momentum, decay = [config.momentum or 0.0] * count, [config.weight_decay or 0.0] * count
        return cls(momentum, [bool(config.nesterov)] * count, decay, [1.0] * count)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of one step, which the caller of an exchange chooses before the first gradient.

    Attributes:
        hyper: momentum, Nesterov and weight decay by parameter; None for those of the config.
        holds: whether the last bucket is sent only when the caller waits for the results. If so, an error that the
            caller meets before that is sent in the same step.
        joins: flags of :class:`~dgc.core.message.Flags` if this rank takes part without data and submits zeros. A step
            in which every rank does so is undone.
        edited: whether the parameters were changed outside of the optimizer's ``step()``. All ranks are told.
    """

    hyper: Hyper | None = None
    holds: bool = False
    joins: int = 0
    edited: bool = False


# The options of a step that begins with its first gradient, without a call of begin().
AS_BUILT = StepOptions()


def refused_scale(scale: float) -> ConfigError | None:
    """Return the error about a wrong loss scale; None if the scale is valid."""
    if np.isfinite(scale) and scale > 0:
        return None
    return ConfigError(f"loss_scale is {scale!r}; allowed: a finite number > 0")


@dataclass(slots=True)
class Step:
    """One training step: the data that all its buckets share.

    Attributes:
        number: counted from 0.
        density: share of the entries to send; None in a dense step.
        fingerprint: a hash of the values that must be equal on all ranks in this step: the layout and ``hyper``.
        scales: the factor by which each parameter's gradient is multiplied first: gain * weight / loss scale, times the
            clipping factor once :class:`~dgc.core.exchange.pipeline.Clipping` has set it.
        joined: the flags, by rank, of the ranks that take part without data; known when the messages have arrived.
        edited: the ranks whose parameters were changed outside of ``step()``; known when the messages have arrived.
        weight: a factor of all gradients: P / T if averages are over T training ranks.
        is_awaited: whether the caller is waiting for the results, and so cannot announce an error any more.
        before: a copy of the state, if this rank takes part without data.
        has_limits: whether some result will be cast to a narrower type.
        coming_scale: a function that waits for the loss scale; None if the scale is known.
    """

    number: int
    density: float | None
    hyper: Hyper
    loss_scale: float
    fingerprint: int
    submissions: Submissions
    options: StepOptions = AS_BUILT
    stats: StepStats = field(default_factory=StepStats)
    scales: list[float] = field(init=False)
    joined: dict[int, int] = field(default_factory=dict)
    edited: set[int] = field(default_factory=set)
    weight: float = 1.0
    is_awaited: bool = False
    before: State | None = None
    has_limits: bool = False
    coming_scale: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self._set_scale(self.loss_scale)

    def await_scale(self, ask: Callable[[], float]) -> ConfigError | None:
        """Wait for the loss scale and set it; return the error for all ranks if the scale is wrong."""
        try:
            scale = ask()
        except Exception as error:
            return ConfigError(f"loss_scale could not be read: {type(error).__name__}: {error}")
        if (refused := refused_scale(scale)) is None:
            self._set_scale(float(scale))
        return refused

    def _set_scale(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        self.scales = list(map((self.weight / loss_scale).__mul__, self.hyper.gain))
