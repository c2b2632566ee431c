"""Place parameters into buckets of segments.

All ranks must have the same layout; comparing fingerprints shows whether they do.

Letters: n elements of a bucket's flat space, S segments.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from dgc.core.config import DGCConfig
from dgc.errors import LayoutError, WireError

# Segments start at multiples of this many elements, so that a kernel's vector loads are aligned.
ALIGNMENT = 16

# Positions within a bucket, which count padding, are int32 on a device and in the message.
MAX_BUCKET_ELEMENTS = 2**31 - 1

# Tensors of up to this many elements are processed together if that saves calls; their entries are selected without a
# threshold.
SMALL = 4096

# The types that a parameter may have, and the NumPy types of its array. NumPy has no bfloat16, so arrays hold its bits.
FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


@dataclass(frozen=True)
class Parameter:
    """The facts about one trainable tensor that must be equal on all ranks: all but its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """The place of one parameter in its bucket's flat space."""

    parameter: int
    offset: int
    length: int

    @cached_property
    def slice(self) -> slice:
        """The segment's range in the bucket's flat space."""
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are exchanged together.

    Sparsified tensors come first in the flat space, then small ones, then the other dense ones.

    Attributes:
        sparse_size: elements of the sparsified tensors, with padding.
        small_size: elements of the small tensors, with padding. These may be sent coded: they are float32, and dense
            because of their shape or size, not because a user excluded them.
        size: elements of the flat space, with padding.
    """

    index: int
    dtype: str
    sparse: tuple[Segment, ...]
    dense: tuple[Segment, ...]
    sparse_size: int
    size: int
    small_size: int = 0

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in the order of the flat space."""
        return self.sparse + self.dense

    @cached_property
    def small(self) -> tuple[Segment, ...]:
        """The dense segments that may be sent coded."""
        return tuple(s for s in self.dense if s.offset < self.sparse_size + self.small_size)

    @cached_property
    def sparse_offsets(self) -> np.ndarray:
        """(S + 1,) int64: where each sparsified segment starts, then ``sparse_size``."""
        return np.array([s.offset for s in self.sparse] + [self.sparse_size], dtype=np.int64)

    @cached_property
    def sparse_ends(self) -> np.ndarray:
        """(S,) int64: where each sparsified segment ends; padding follows."""
        return np.array([s.slice.stop for s in self.sparse], np.int64)

    def bounds(self, positions: np.ndarray) -> np.ndarray:
        """Call :func:`bounds_of` for the sparsified tensors."""
        return bounds_of(positions, self.sparse_offsets, self.sparse_ends)


@dataclass(frozen=True)
class Layout:
    """All parameters of one compressor and the buckets that they form, the same on every rank."""

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    places: dict[int, tuple[int, Segment]] = field(repr=False)  # parameter index -> (bucket index, segment)

    @cached_property
    def fingerprint(self) -> int:
        """64-bit digest of names, shapes, types and placement; every message carries it."""
        text = json.dumps(
            [
                [[p.name, list(p.shape), p.dtype] for p in self.parameters],
                [[b.dtype, [[s.parameter, s.offset] for s in b.segments], b.sparse_size] for b in self.buckets],
            ]
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def sparse_numel(self) -> int:
        """Elements of the sparsified parameters."""
        return sum(s.length for b in self.buckets for s in b.sparse)

    def is_sparsified(self, parameter: int) -> bool:
        """Return whether a parameter is sparsified once the ramp-up has begun."""
        bucket, segment = self.places[parameter]
        return segment.offset < self.buckets[bucket].sparse_size

    def sparsified(self) -> dict[str, bool]:
        """Return parameter name -> :meth:`is_sparsified`."""
        return {p.name: self.is_sparsified(i) for i, p in enumerate(self.parameters)}

    def describe(self) -> dict[str, str]:
        """Return parameter name -> shape and type, in registration order, for the ranks to compare."""
        return {p.name: f"{tuple(p.shape)} {p.dtype}" for p in self.parameters}


def bounds_of(positions: np.ndarray, offsets: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Split ascending positions by tensor: return (S + 1,) int64, the index of each tensor's first position, then k.

    Args:
        positions: (k,) int64, ascending.
        offsets: (S + 1,) int64, where each tensor begins, then the end of the last one with its padding.
        ends: (S,) int64, where each tensor ends; padding follows.

    Raises:
        WireError: a position belongs to no tensor.
    """
    bounds = np.searchsorted(positions, offsets)
    if bounds[-1] - bounds[0] < positions.size or (np.searchsorted(positions, ends) < bounds[1:]).any():
        raise WireError("a position lies in the padding between tensors, where no sender selects entries")
    return bounds


def sent_dense(parameter: Parameter, config: DGCConfig) -> bool:
    """Return whether a parameter is sent dense in all steps.

    This holds for float64 and excluded parameters, and for 1-D and small ones that the user has not included.
    """
    if parameter.numel == 0 or parameter.dtype == "float64" or _matches(parameter, config.exclude):
        return True
    if _matches(parameter, config.include):
        return False
    return len(parameter.shape) <= 1 or parameter.numel < config.min_numel


def _matches(parameter: Parameter, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(parameter.name, pattern) for pattern in patterns)


def make_layout(parameters: Sequence[Parameter], config: DGCConfig) -> Layout:
    """Place parameters into buckets, in reverse registration order, because gradients arrive in this order.

    float64 parameters get separate buckets, which are dense and have a float64 momentum.

    Raises:
        LayoutError: there are no parameters, two have the same name, or one is too large or not of a float type.
    """
    parameters = tuple(parameters)
    _check(parameters)
    capacity = max(1, config.bucket_bytes // 4)
    groups: list[tuple[str, list[int]]] = []
    open_group: dict[str, tuple[list[int], int, int]] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        dtype = "float64" if parameter.dtype == "float64" else "float32"
        members, filled, placed = open_group.get(dtype, ([], 0, 0))
        room = _padded(parameter.numel)
        # The option bucket_bytes limits the elements without padding, MAX_BUCKET_ELEMENTS those with padding.
        if not members or filled + parameter.numel > capacity or placed + room > MAX_BUCKET_ELEMENTS:
            members, filled, placed = [], 0, 0
            groups.append((dtype, members))
        members.append(index)
        open_group[dtype] = (members, filled + parameter.numel, placed + room)
    buckets = tuple(_bucket(i, *group, parameters, config) for i, group in enumerate(groups))
    places = {s.parameter: (b.index, s) for b in buckets for s in b.segments}
    return Layout(parameters, buckets, places)


def _padded(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _bucket(index: int, dtype: str, members: list[int], parameters: tuple[Parameter, ...], config: DGCConfig) -> Bucket:
    offset = 0

    def place(chosen: list[int]) -> tuple[Segment, ...]:
        nonlocal offset
        placed = []
        for i in chosen:
            placed.append(Segment(i, offset, parameters[i].numel))
            offset += _padded(parameters[i].numel)
        return tuple(placed)

    sparse = place([i for i in members if not sent_dense(parameters[i], config)])
    sparse_size = offset
    dense = [i for i in members if sent_dense(parameters[i], config)]
    exact = {i for i in dense if dtype == "float64" or _matches(parameters[i], config.exclude)}
    small = place([i for i in dense if i not in exact])
    small_size = offset - sparse_size
    rest = place([i for i in dense if i in exact])
    return Bucket(index, dtype, sparse, small + rest, sparse_size, offset, small_size)


def _check(parameters: tuple[Parameter, ...]) -> None:
    if not parameters:
        raise LayoutError("no parameters to compress; pass the model's trainable parameters")
    seen: set[str] = set()
    for p in parameters:
        if p.name in seen:
            raise LayoutError(f"two parameters are named {p.name!r}; give every parameter a different name")
        seen.add(p.name)
        if p.dtype not in FLOAT_TYPES:
            raise LayoutError(f"parameter {p.name!r} has type {p.dtype}; allowed: {', '.join(FLOAT_TYPES)}")
        if p.numel > MAX_BUCKET_ELEMENTS - ALIGNMENT:
            raise LayoutError(
                f"parameter {p.name!r} has {p.numel} elements; a compressed tensor may have at most "
                f"{MAX_BUCKET_ELEMENTS - ALIGNMENT}: split it, or leave it out of the compressor"
            )
