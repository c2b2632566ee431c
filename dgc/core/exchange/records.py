"""What one training step hands to its buckets, what they leave behind, and the counters that a user reads."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Bucket, Layout, Segment
from dgc.core.state import State
from dgc.errors import ConfigError, LayoutError


@dataclass(slots=True)
class Submission:
    """One parameter's gradient of this step, and where its result goes. All arrays are 1-D and contiguous.

    ``result`` may be the gradient's own memory: it is written after the gradient was read for the last time.
    ``limit`` is the largest finite value of the type that the result will be cast to, if that is a narrower one.
    ``absent``: this rank has no gradient, for which zeros stand here.
    ``ready`` is for arrays on a device: its ``stream`` (comparable) is that on which they are made, its ``record()``
    returns an event behind everything that this stream has been given, with its CUDA handle as ``handle``.
    """

    gradient: np.ndarray
    result: np.ndarray
    parameter: np.ndarray | None = None
    limit: float | None = None
    ready: Any = None
    absent: bool = False


class Submissions(dict[int, Submission]):
    """The gradients of one step by parameter, as they arrive. The caller holds the lock of the step."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self.missing = [len(b.segments) for b in layout.buckets]
        """Gradients of each bucket that have not arrived."""
        self.absent: set[int] = set()
        """Parameters of which this rank has no gradient."""
        self.events: dict[int, list[Any]] = {}
        """By complete bucket, what has to come before its gradients may be read on a device."""

    def of(self, segments: Sequence[Segment]) -> list[Submission]:
        """What was handed over for the segments of a complete bucket."""
        return [self[segment.parameter] for segment in segments]

    def add(self, parameter: int, item: Submission) -> bool:
        """Take one in; returns whether it was the last of its bucket."""
        if parameter in self:
            raise LayoutError(
                f"the gradient of {self._layout.parameters[parameter].name!r} was given twice in one step; call "
                "synchronize() or step() after each backward pass, or set backward_passes_per_step"
            )
        self[parameter] = item
        bucket, _ = self._layout.places[parameter]
        self.missing[bucket] -= 1
        if item.absent:
            self.absent.add(parameter)
        if self.missing[bucket] or item.ready is None:
            return self.missing[bucket] == 0
        # One event for each stream: it stands behind all that the stream was given before.
        members = self.of(self._layout.buckets[bucket].segments)
        streams = {m.ready.stream: m.ready for m in members if m.ready is not None}
        self.events[bucket] = [ready.record() for ready in streams.values()]
        return True


@dataclass(slots=True)
class Hyper:
    """Momentum, Nesterov and weight decay by parameter, as they are in one step.

    The core does not use learning rates; the ranks must share them.
    """

    momentum: list[float]
    nesterov: list[bool]
    weight_decay: list[float]
    gain: list[float]
    """What a clipped gradient is multiplied by before it is added to u: 1, or less where u is a running mean."""
    learning_rates: tuple[float, ...] = ()
    """Of the optimizer's parameter groups, where the adapter knows them."""
    restored: bool = False
    """Whether residuals and momentum were dropped before this step, since a state was loaded into the optimizer."""

    def chosen(self, indices: Iterable[int], learning_rates: tuple[float, ...] = (), restored: bool = False) -> Hyper:
        """The options of some parameters, in this order, with what belongs to the step."""
        places = list(indices)
        momentum, nesterov = list(map(self.momentum.__getitem__, places)), list(map(self.nesterov.__getitem__, places))
        decay, gain = list(map(self.weight_decay.__getitem__, places)), list(map(self.gain.__getitem__, places))
        return Hyper(momentum, nesterov, decay, gain, learning_rates, restored)

    def digest(self) -> int:
        """64-bit digest of all values; of learning rates 6 digits, which unlike machines compute alike."""
        table = np.array([self.momentum, self.nesterov, self.weight_decay, self.gain], dtype=np.float64)
        rates = " ".join(map("{:.5e}".format, self.learning_rates)).encode() + b" restored" * self.restored
        return int.from_bytes(hashlib.blake2b(table.tobytes() + rates, digest_size=8).digest(), "little")

    @classmethod
    def uniform(cls, count: int, config: DGCConfig) -> Hyper:
        """The config's values for every parameter; what is None there is 0."""
        return cls(
            [config.momentum or 0.0] * count,
            [bool(config.nesterov)] * count,
            [config.weight_decay or 0.0] * count,
            [1.0] * count,
        )


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What the caller of an exchange decides for one step, before its first gradient.

    Attributes:
        hyper: momentum, Nesterov and weight decay by parameter; None for those of the config.
        holds: whether the last bucket waits until the caller waits for the results: an error that the caller meets
            before that is sent in the same step.
        defers: whether sums of entries may be left to the caller, who calls ``deferred()`` or ``write_deferred()``
            after ``finish()``.
        joins: flags of :class:`~dgc.core.message.Flags` where this rank takes part without data: it submits zeros. A
            step in which every rank does so is undone.
    """

    hyper: Hyper | None = None
    holds: bool = False
    defers: bool = False
    joins: int = 0


AS_BUILT = StepOptions()
"""Those of a step that begins with its first gradient, without any."""

_SECONDS = {"compress": 0.0, "exchange": 0.0, "apply": 0.0, "wait": 0.0}


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
        small_bytes: of ``bytes_sent``, those of tensors that were sent dense beside sparsified ones.
        seconds: by phase: "compress", "exchange" and "apply" on the communication thread, "wait" on the caller's.
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
        """Dense bytes over bytes sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def density(self) -> float:
        """Share of the sparsified tensors' entries that was sent."""
        return self.entries_sent / self.sparse_elements if self.sparse_elements else 0.0

    def add(self, other: StepStats) -> None:
        """Add another record to this one."""
        for name in ("bytes_sent", "bytes_received", "dense_bytes", "entries_sent", "sparse_elements", "small_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def count_collective(self, nbytes: int) -> None:
        """Count an allreduce of ``nbytes``."""
        self.bytes_sent += nbytes
        self.bytes_received += nbytes

    def lap(self, phase: str, since: float) -> float:
        """Count the seconds since ``since``, an earlier ``perf_counter()`` or lap; returns the time that it is."""
        now = time.perf_counter()
        self.seconds[phase] += now - since
        return now

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for printing and logging."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "density": self.density}


def refused_scale(scale: float) -> ConfigError | None:
    """What is wrong with a loss scale."""
    if np.isfinite(scale) and scale > 0:
        return None
    return ConfigError(f"loss_scale is {scale!r}; allowed: a finite number > 0")


@dataclass(slots=True)
class StepContext:
    """One training step: what all its buckets share. ``density`` is None in a dense step."""

    step: int
    density: float | None
    hyper: Hyper
    loss_scale: float
    fingerprint: int
    """What all ranks must share in this step: layout, momentum, Nesterov, weight decay and learning rates."""
    submissions: Submissions
    options: StepOptions = AS_BUILT
    stats: StepStats = field(default_factory=StepStats)
    scales: list[float] = field(init=False)
    """What each parameter's gradient is multiplied by before anything else: gain * weight / loss scale, and its
    clipping factor once :class:`~dgc.core.exchange.exchange.Clipping` has met its bucket."""
    joined: dict[int, int] = field(default_factory=dict)
    """Rank -> its flags, of the ranks that take part without data; once the messages are in."""
    weight: float = 1.0
    """What gradients are multiplied by: P / T where averages are over T training ranks."""
    is_awaited: bool = False
    """Whether the caller waits for the results: it has nothing left to find wrong with the gradients."""
    before: State | None = None
    """A copy of the state, on a rank that takes part without data."""
    has_limits: bool = False
    """Whether a result is to be cast to a narrower type."""
    coming_scale: Callable[[], float] | None = None
    """Where the loss scale is still on its way: returns it. Waits."""

    def __post_init__(self) -> None:
        self.scales = list(map((self.weight / self.loss_scale).__mul__, self.hyper.gain))

    def await_scale(self, ask: Callable[[], float]) -> ConfigError | None:
        """Have the loss scale; returns what is wrong with it, for all ranks."""
        try:
            scale = ask()
        except Exception as error:
            return ConfigError(f"loss_scale could not be read: {type(error).__name__}: {error}")
        if (refused := refused_scale(scale)) is None:
            self.loss_scale = float(scale)
            self.scales = list(map((self.weight / self.loss_scale).__mul__, self.hyper.gain))
        return refused


@dataclass(frozen=True, slots=True)
class EntrySum:
    """What all ranks together sent of a bucket's sparsified tensors: their result, without its zeros.

    Attributes:
        bucket: the bucket.
        positions: (n,) int64 within the bucket's flat space, ascending and unique.
        values: (n,) of the bucket's type.
        bounds: (S + 1,) int64; tensor s has the entries from ``bounds[s]`` to ``bounds[s + 1]``.
    """

    bucket: Bucket
    positions: np.ndarray
    values: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, bucket: Bucket, entries: Sequence[tuple[np.ndarray, np.ndarray]], factor: float) -> EntrySum:
        """Add up the ranks' (positions, values) in rank order, times ``factor``."""
        from dgc.core.kernels.cpu import add_up  # which loads Numba

        positions, values = add_up(entries, factor)
        return cls(bucket, positions, values, bucket.bounds(positions))

    def tensors(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The tensors that anything was sent of: (parameter, (m,) int64 places within it, (m,) values)."""
        for segment, first, stop in zip(self.bucket.sparse, self.bounds, self.bounds[1:], strict=False):
            if first < stop:
                yield segment.parameter, self.positions[first:stop] - segment.offset, self.values[first:stop]

    def write(self, step: StepContext, kernels: Kernels) -> None:
        """Make the results of the sparsified tensors: these values, and zeros."""
        results = [item.result for item in step.submissions.of(self.bucket.sparse)]
        kernels.set_entries(results, self.bucket.sparse_offsets, self.positions, self.values)


@dataclass
class Stats:
    """What ``compression.stats`` shows.

    Attributes:
        steps: steps exchanged, refused ones included.
        refused_steps: steps that met a non-finite value and were taken back.
        last: the latest step.
        total: the sum over all steps since construction or ``reset()``.
        beside: bytes that an adapter hands to collectives of its own in the step under way, e.g. placeholders.
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
        """Add bytes that an adapter handed to collectives of its own after the latest step."""
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
