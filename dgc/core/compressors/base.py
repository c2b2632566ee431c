"""The base classes of compressors. A compressor states a few facts, and has methods that turn a bucket into bytes.

All compressors share everything else: momentum correction, clipping, ramp-up, error feedback, refused steps,
transports and adapters. ``docs/add-a-compressor.md`` has a complete example.

Letters: n elements of one tensor, N elements of a bucket's flat space (its padding is 0), P ranks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import override

from dgc.core.codecs import check_positions, padded
from dgc.core.config import DGCConfig
from dgc.core.layout import Bucket
from dgc.errors import WireError

# Options of every compressor.
COMMON = (
    "rampup_begin_step local_grad_clip_norm clip_scope min_numel include exclude small bucket_bytes op "
    "hierarchical exchange"
).split()
# Options of compressors with error feedback.
FEEDBACK = ["momentum", "nesterov", "weight_decay", "error_feedback", "late"]


@dataclass(frozen=True)
class NoOptions:
    """The (empty) options of a compressor that has only the common ones."""


@dataclass(frozen=True)
class Tensor:
    """One sparsified tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int  # where it begins in the bucket's flat space
    n: int

    @property
    def slice(self) -> slice:
        """The tensor's range in the bucket's flat space."""
        return slice(self.offset, self.offset + self.n)


@dataclass(frozen=True)
class BucketSpec:
    """A bucket at one density: the facts that all ranks know before they encode."""

    bucket: Bucket
    tensors: tuple[Tensor, ...]
    density: float  # the schedule's share of entries to send; 1 for compressors without a schedule
    total: int  # elements of all buckets together

    @property
    def size(self) -> int:
        """N, elements of the flat space."""
        return self.bucket.sparse_size


@dataclass
class StepInfo:
    """The facts that differ between steps or ranks.

    Attributes:
        thresholds: (S, c) float64, numbers that the compressor keeps between steps and that checkpoints contain; NaN
            at first.
        shared: for each tensor, the largest number that :meth:`Algorithm.prepare` returned on any rank.
        increment: (N,), the values that this step added to x; only for compressors with ``needs_increment``.
    """

    step: int
    rank: int
    seed: int
    thresholds: np.ndarray
    shared: np.ndarray = field(default_factory=lambda: np.empty(0))
    increment: np.ndarray | None = None

    def key(self, tensor: str) -> np.uint64:
        """Return the key of this rank's random numbers for a tensor in this step."""
        text = f"{self.seed} {self.rank} {self.step} {tensor}"
        return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


@dataclass
class SparseValues:
    """A decoded message of selected entries: (k,) int64 ascending positions in the bucket, and (k,) values."""

    positions: np.ndarray
    values: np.ndarray


@dataclass
class DenseValues:
    """A decoded message of all entries: for each tensor (n,) float32."""

    values: list[np.ndarray]


class Algorithm(ABC):
    """One compressor. An object serves all buckets of a model on one rank; only one thread calls it at a time.

    A subclass sets the facts and implements :meth:`max_bytes`, :meth:`encode` and :meth:`decode`. Or it derives from
    :class:`PerTensor` and implements similar methods for one tensor.

    Attributes:
        number: its number in headers: 1 to 127 for this package, 128 to 255 for other compressors.
        bits: a text about the bits that it sends, for the table of compressors.
        error_feedback: whether the part of x that a message leaves out stays in a residual.
        unbiased: whether random rounding makes decoded values equal x on average. It adds the option ``seed``.
        sends_entries: whether messages hold selected entries. It adds the option ``momentum_masking``.
        scheduled: whether it has the options ``sparsity`` and ``rampup_step``.
        coded: whether it has the options ``indices`` and ``values``.
        needs_increment: whether :meth:`encode` needs ``info.increment``.
        shares: whether :meth:`encode` needs ``info.shared``.
        Options: a frozen dataclass of the options that only this compressor has.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    source: ClassVar[str]
    bits: ClassVar[str]
    error_feedback: ClassVar[bool]
    unbiased: ClassVar[bool] = False
    sends_entries: ClassVar[bool] = False
    scheduled: ClassVar[bool] = False
    coded: ClassVar[bool] = False
    needs_increment: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    Options: ClassVar[Any] = NoOptions

    def __init__(self, config: DGCConfig) -> None:
        """Store all options as ``self.config``, and the compressor's own options as ``self.options``."""
        self.config = config
        self.options = config.own

    # -- facts -----------------------------------------------------------------------------------------------------

    @classmethod
    def common_options(cls) -> list[str]:
        """Return the names of the common options that this compressor has."""
        names = list(COMMON)
        if cls.error_feedback:
            names += FEEDBACK
            if cls.sends_entries:
                names.append("momentum_masking")
        if cls.scheduled:
            names += ["sparsity", "rampup_step"]
        if cls.coded:
            names += ["indices", "values"]
        if cls.unbiased:
            names.append("seed")
        return names

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults that differ from those of ``dgc``. Momentum is 0: none is taken from the optimizer."""
        return {"momentum": 0.0, "momentum_masking": False, "sparsity": 0.0, "values": "int2", "small": "float32"}

    @classmethod
    def is_plain_selection(cls, config: DGCConfig) -> bool:
        """Return whether the compressor only selects the k largest entries, so that the exchange need not call it."""
        return False

    def codec_ids(self, spec: BucketSpec) -> tuple[int, int]:
        """Return the numbers of the index and the value codec for the header."""
        return 0, 0

    @classmethod
    def sends_all(cls, density: float) -> bool:
        """Return whether the schedule is at sparsity 0. Then all values are sent, as float32."""
        return cls.scheduled and density >= 1.0

    def has_room_for_all(self, spec: BucketSpec) -> bool:
        """Return whether a message can hold all entries. Then all are sent, and momentum is not masked."""
        return self.sends_all(spec.density)

    # -- sizes: the same on every rank -----------------------------------------------------------------------------

    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:
        """Return the most entries of each tensor; a message holds at most their sum."""
        return tuple(t.n for t in spec.tensors)

    @abstractmethod
    def max_bytes(self, spec: BucketSpec) -> int:
        """Return the most bytes that a message takes."""

    # -- a step ----------------------------------------------------------------------------------------------------

    def prepare(self, x: np.ndarray, spec: BucketSpec) -> np.ndarray:
        """Return (S,) numbers >= 0, one per tensor. :meth:`encode` gets the largest one over all ranks."""
        return np.zeros(len(spec.tensors))

    @abstractmethod
    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        """Write a bucket's message.

        Args:
            x: (N,) float32 (float64 in float64 buckets), finite, read only: the residual plus the gradient.
            out: (m,) uint8, m >= :meth:`max_bytes`, of any content.
            spec: the bucket.
            info: the step.

        Returns:
            Entries in the message, and bytes written.
        """

    @abstractmethod
    def decode(self, data: np.ndarray, count: int, spec: BucketSpec) -> SparseValues | DenseValues:
        """Read a message of any rank, including this one. The same bytes must give the same values on every rank.

        A compressor returns one of the two types, and always the same one.

        Args:
            data: (m,) uint8: the bytes that :meth:`encode` wrote, then zeros.
            count: the number of entries, from the message's header.
            spec: the bucket.

        Raises:
            WireError: the message is damaged.
        """

    def finish(self, spec: BucketSpec, thresholds: np.ndarray, *, refused: bool) -> None:
        """End a step of a bucket, after all buckets have been encoded."""
        return


class PerTensor(Algorithm):
    """A compressor that encodes each tensor separately, into a block at a fixed place in the message."""

    @abstractmethod
    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:
        """Return the most bytes that a tensor takes."""

    @abstractmethod
    def encode_tensor(self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo) -> int:
        """Write a tensor's block and return the number of entries in it.

        Args:
            x: (n,) float32 or float64, finite, read only.
            out: (:meth:`tensor_bytes`,) uint8 zeros.
            tensor: the tensor.
            spec: its bucket.
            info: the step.
        """

    @abstractmethod
    def decode_tensor(
        self, data: np.ndarray, tensor: Tensor, spec: BucketSpec
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Read a tensor's block: (n,) float32, or with ``sends_entries`` (k,) int64 positions and (k,) float32.

        Raises:
            WireError: the block is damaged.
        """

    @override
    def max_bytes(self, spec: BucketSpec) -> int:
        return sum(padded(self.tensor_bytes(t, spec)) for t in spec.tensors)

    @override
    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        count = at = 0
        for tensor in spec.tensors:
            size = self.tensor_bytes(tensor, spec)
            block = out[at : at + size]
            block[...] = 0
            count += self.encode_tensor(x[tensor.slice], block, tensor, spec, info)
            out[at + size : at + padded(size)] = 0
            at += padded(size)
        return count, at

    @override
    def decode(self, data: np.ndarray, count: int, spec: BucketSpec) -> SparseValues | DenseValues:
        at, parts = 0, []
        for tensor in spec.tensors:
            size = self.tensor_bytes(tensor, spec)
            if at + size > data.size:
                raise WireError(f"{tensor.name!r} takes {size} bytes, the message has {data.size - at} left for it")
            parts.append(self.decode_tensor(data[at : at + size], tensor, spec))
            at += padded(size)
        if not self.sends_entries:
            if count != sum(t.n for t in spec.tensors):
                raise WireError(f"a message has {count} entries, and this compressor sends every element")
            return DenseValues(parts)  # type: ignore[arg-type]
        return joined(parts, count, spec)


def joined(parts: Sequence[Any], count: int, spec: BucketSpec) -> SparseValues:
    """Join the entries of a bucket's tensors, each (k,) positions in the tensor and (k,) values."""
    for (positions, _), tensor in zip(parts, spec.tensors, strict=True):
        check_positions(positions, tensor.n, tensor.name)
    found = sum(positions.size for positions, _ in parts)
    if found != count:
        raise WireError(f"the header says {count} entries, there are {found}; the message is damaged")
    positions = [p + t.offset for (p, _), t in zip(parts, spec.tensors, strict=True)]
    return SparseValues(np.concatenate(positions), np.concatenate([values for _, values in parts]))


def put(out: np.ndarray, at: int, values: np.ndarray) -> int:
    """Copy an array's bytes to ``out`` from byte ``at`` on; return where they end."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    out[at : at + data.size] = data
    return at + data.size


def take(data: np.ndarray, at: int, count: int, dtype: DTypeLike) -> np.ndarray:
    """Return a copy of ``count`` numbers from byte ``at`` on."""
    size = count * np.dtype(dtype).itemsize
    if at + size > data.size:
        raise WireError(f"a block of {data.size} bytes ends before its content; the message is damaged")
    return data[at : at + size].copy().view(dtype)


def take_scales(data: np.ndarray, count: int, *, signed: bool = False) -> np.ndarray:
    """Return a block's first ``count`` float32. Refuse those that are not finite or, unless ``signed``, below 0."""
    scales = take(data, 0, count, np.float32)
    if not (np.isfinite(scales) & (signed | (scales >= 0))).all():
        raise WireError(f"a scale is not a finite number{'' if signed else ' >= 0'}; the message is damaged")
    return scales


def as_scale(value: float) -> np.float32:
    """Convert a float64 >= 0 to a finite float32."""
    return np.float32(min(value, float(np.finfo(np.float32).max)))
