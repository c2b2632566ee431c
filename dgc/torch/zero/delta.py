"""Which entries an update changed, bit for bit, and how they travel: as entries or whole, alike on every rank.

And whether something else than an update may have changed them on one rank alone.

P = number of ranks, n = n_r = elements that rank r owns, k = k_r = entries that its update changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dgc.core.wire import IndexCodec, padded, smallest_index_codec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARRAY_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_LONGEST_PAUSE = 64
_LONGEST_TRUST = 512


@dataclass(frozen=True)
class Changes:
    """Entries with new values.

    Attributes:
        positions: (k,) int64, ascending, in the shard's flat space.
        values: (k,) integers whose bits are the new values.
    """

    positions: np.ndarray
    values: np.ndarray


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """(numel,) integers with the tensor's bits in logical order; its memory if it is contiguous, else a copy."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


def bits_dtype(itemsize: int) -> np.dtype:
    """The NumPy type of :func:`bits_of` for elements of ``itemsize`` bytes."""
    return np.dtype(_ARRAY_BITS[itemsize])


class ChangeTracker:
    """Remembers the shard before an update and compares afterwards.

    That costs a copy of the shard and two passes over it, wasted when an update touches everything (Adam after a few
    steps). So it looks at the gradients first, and after each step that turned out dense it pauses twice as long.
    Bits are compared, not values: -0.0 replaces 0.0, and a NaN arrives as it is.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Track (owned) parameters; their order is that of the flat space."""
        self._parameters = parameters
        self._starts = np.cumsum([0] + [p.numel() for p in parameters])
        self._before: dict[int, torch.Tensor] = {}
        self._watched: list[int] | None = None
        self._pause = 1
        self._skip = 0

    @property
    def numel(self) -> int:
        """Elements n of the shard."""
        return int(self._starts[-1])

    def before_update(self, *, gradients_known: bool) -> None:
        """Take a copy, unless the update will most likely change more than half of the shard.

        Args:
            gradients_known: False when a closure is going to compute them.
        """
        self._watched = None
        if self._skip:
            self._skip -= 1
            return
        # What is frozen and has no old gradient either stays as it is; anything else may change, gradient or not.
        candidates = [
            i for i, p in enumerate(self._parameters) if p.numel() and (p.requires_grad or p.grad is not None)
        ]
        if gradients_known and 2 * sum(_touched(self._parameters[i].grad) for i in candidates) > self.numel:
            self._before.clear()
            return
        for i in candidates:
            bits = bits_of(self._parameters[i])
            kept = self._before.get(i)
            if kept is None or (kept.shape, kept.dtype, kept.device) != (bits.shape, bits.dtype, bits.device):
                self._before[i] = bits.clone()
            else:
                kept.copy_(bits)
        self._watched = candidates

    def after_update(self) -> Changes | None:
        """What changed since :meth:`before_update`; None when that is unknown or more than half of the shard."""
        if self._watched is None:
            return None
        positions, values, count = [], [], 0
        for i in self._watched:
            bits = bits_of(self._parameters[i])
            changed = (bits != self._before[i]).nonzero().view(-1)
            count += changed.numel()
            if 2 * count > self.numel:
                self._before.clear()
                self._skip, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
                return None
            values.append(bits[changed].cpu().numpy())
            positions.append(changed.cpu().numpy() + self._starts[i])
        self._pause = 1
        if not positions:
            return Changes(np.empty(0, np.int64), np.empty(0, np.int32))
        return Changes(np.concatenate(positions), np.concatenate(values))


def _touched(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    if gradient.is_sparse:
        width = gradient.numel() // max(1, gradient.shape[0])
        return gradient._nnz() * width
    return int(torch.count_nonzero(gradient))


class ReplicaWatch:
    """Says when the ranks' parameters should be compared: they may differ although every step made them equal.

    They do when the ranks started with different ones, or changed one between two steps on some ranks alone. Most such
    writes show in PyTorch's counter of writes, or as another address. A script that writes between all steps (it limits
    the weights, say) is asked less and less often. A write through ``.data`` does not show: therefore the steps
    1, 2, 3, 5, 9, ... 513, 1025, 1537, ... compare as well.
    """

    def __init__(self) -> None:
        """Suspect until the first :meth:`remember`."""
        self._marks: list[tuple[int, int]] | None = None
        self._steps = 0
        self._pause = 1
        self._skip = 0

    def suspects(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether ``parameters`` should be compared in this step; asked before it changes them."""
        steps = self._steps
        due = steps % _LONGEST_TRUST == 0 if steps > _LONGEST_TRUST else steps & (steps - 1) == 0
        if self._marks == _marks_of(parameters):
            self._pause, self._skip = 1, 0
            return due
        if self._skip:
            self._skip -= 1
            return due
        self._skip, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return True

    def remember(self, parameters: Sequence[torch.Tensor]) -> None:
        """A step has made ``parameters`` equal on all ranks."""
        self._marks = _marks_of(parameters)
        self._steps += 1


def _marks_of(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(0 if p.is_inference() else p._version, p.data_ptr()) for p in parameters]


def values_digest(parameters: Sequence[torch.Tensor]) -> int:
    """64 signed bits of a digest of all bits of ``parameters``."""
    digest = hashlib.blake2b(digest_size=8)
    for p in parameters:
        digest.update(np.ascontiguousarray(bits_of(p).cpu().numpy()).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


UNKNOWN = -1
"""Count of an owner that does not know what changed, or knows that it was most of it."""


@dataclass(frozen=True)
class Travel:
    """One step's traffic.

    Attributes:
        sparse: owners whose changes go as entries, all in one allgather.
        dense: owners whose parameters are broadcast whole.
        row_bytes: bytes of each rank's message in the allgather; 0 when there is none.
    """

    sparse: tuple[int, ...]
    dense: tuple[int, ...]
    row_bytes: int


def entries_bytes(n: int, k: int, itemsize: int) -> int:
    """Bytes of k changed entries out of n: positions in the smallest codec, then the values."""
    return smallest_index_codec(n, k).max_bytes(n, k) + padded(k * itemsize) if k else 0


def choose_travel(counts: Sequence[int], numels: Sequence[int], itemsize: int) -> Travel:
    """Find the split between entries and whole parameters that moves the fewest bytes.

    Entries go in one allgather, whose messages are as long as the longest, so every rank pays for the largest of them:
    P times the row, against one broadcast of ``n_r`` elements for each owner left out. The best row length is that of
    one of the owners.

    Args:
        counts: (P,) k_r, or :data:`UNKNOWN`.
        numels: (P,) n_r.
        itemsize: bytes of a value.
    """
    ranks = len(counts)
    dense_bytes = [n * itemsize for n in numels]
    sizes = [None if k == UNKNOWN else entries_bytes(n, k, itemsize) for n, k in zip(numels, counts, strict=True)]

    def cost(row: int) -> int:
        left_out = sum(d for d, s in zip(dense_bytes, sizes, strict=True) if s is None or s > row)
        return ranks * row + left_out

    row = min(sorted({0} | {s for s in sizes if s is not None}), key=cost)
    sparse = tuple(r for r, s in enumerate(sizes) if s is not None and 0 < s <= row)
    dense = tuple(r for r, s in enumerate(sizes) if numels[r] and (s is None or s > row))
    return Travel(sparse, dense, row if sparse else 0)


def write_entries(positions: np.ndarray, values: np.ndarray, n: int, row: np.ndarray) -> None:
    """Write an owner's message.

    Args:
        positions: (k,) int64, ascending.
        values: (k,) integers, the values' bits.
        n: elements of the owner's shard.
        row: (row_bytes,) uint8; what is left over is zeroed.
    """
    used = _codec(n, positions.size).encode(positions, n, row)
    raw = values.view(np.uint8)
    row[used : used + raw.size] = raw
    row[used + raw.size :] = 0


def read_entries(row: np.ndarray, n: int, k: int, bits: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Read an owner's message: (k,) positions and (k,) values.

    Raises:
        WireError: the message is damaged.
    """
    positions, used = _codec(n, k).decode(row, n, k)
    return positions, row[used : used + k * bits.itemsize].view(bits)


def _codec(n: int, k: int) -> IndexCodec:
    return smallest_index_codec(n, k)
