"""Which entries an update changed, bit for bit, and how they are sent: as entries or whole, alike on every rank.

P = number of ranks, n = n_r = elements that rank r owns, k = k_r = entries that its update changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dgc.core.codecs import padded, smallest_index_codec

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONGEST_PAUSE = 64
_COLUMNS = 1021
"""A prime, so that two rows of a matrix that change places change the sums."""

UNKNOWN = -1
"""Count of an owner that does not know what changed, or knows that it was most of it."""


@dataclass(frozen=True)
class Changes:
    """Entries with new values.

    Attributes:
        positions: (k,) int64, ascending, in the shard's flat space.
        values: (k,) integers whose bits are the new values.
    """

    positions: np.ndarray
    values: np.ndarray


def starts_of(shard: Sequence[torch.Tensor]) -> np.ndarray:
    """(parameters + 1,) int64: where each begins in the flat space of a shard, and n."""
    return np.cumsum([0] + [p.numel() for p in shard])


def write_changes(shard: Sequence[torch.Tensor], changes: Changes) -> None:
    """Set the changed entries of an owner's parameters."""
    starts = starts_of(shard)
    bounds = np.searchsorted(changes.positions, starts)
    for p, start, first, last in zip(shard, starts[:-1], bounds[:-1], bounds[1:], strict=True):
        if first == last:
            continue
        bits = bits_of(p)
        places = torch.from_numpy(changes.positions[first:last] - start).to(bits.device)
        bits[places] = torch.from_numpy(changes.values[first:last].copy()).to(bits.device)
        if not p.is_contiguous():
            p.detach().copy_(bits.view(p.dtype).view(p.shape))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """(numel,) integers with the tensor's bits in logical order; its memory if it is contiguous, else a copy."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


def values_digest(parameters: Sequence[torch.Tensor]) -> int:
    """64 signed bits that differ when the bits of ``parameters`` do: a hash of column sums, as fast as memory is."""
    digest = hashlib.blake2b(digest_size=8)
    for p in parameters:
        bits = bits_of(p)
        rows = bits.numel() // _COLUMNS
        if rows:
            table = bits[: rows * _COLUMNS].view(rows, _COLUMNS)
            if table.device.type == "cpu":  # where NumPy's sums of integers are several times faster than torch's
                digest.update(np.add.reduce(table.numpy(), axis=0, dtype=f"i{p.element_size()}"))
            else:
                digest.update(table.sum(0, dtype=bits.dtype).cpu().numpy())
        digest.update(bits[rows * _COLUMNS :].cpu().contiguous().numpy())
    return int.from_bytes(digest.digest(), "little", signed=True)


class ChangeTracker:
    """Copies the shard before an update and compares afterwards.

    That costs a copy of the shard and two passes over it, wasted when an update touches everything (Adam after a few
    steps). So it looks at the gradients first, and after each step that turned out dense it pauses twice as long.
    Bits are compared, not values: -0.0 replaces 0.0, and a NaN arrives as it is.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Track (owned) parameters; their order is that of the flat space."""
        self._parameters = parameters
        self._starts = starts_of(parameters)
        self._before: dict[int, torch.Tensor] | None = None
        self._pause = 1
        self._skip = 0

    def before_update(self, *, gradients_known: bool) -> None:
        """Take a copy, unless the gradients, where they are known, touch more than half of the shard."""
        self._before = None
        if self._skip:
            self._skip -= 1
            return
        # What is frozen and has no old gradient either stays as it is; anything else may change, gradient or not.
        candidates = {
            i: p for i, p in enumerate(self._parameters) if p.numel() and (p.requires_grad or p.grad is not None)
        }
        if not gradients_known or 2 * sum(_touched(p.grad) for p in candidates.values()) <= self._starts[-1]:
            self._before = {i: bits_of(p).clone() for i, p in candidates.items()}

    def after_update(self) -> Changes | None:
        """What changed since :meth:`before_update`; None when that is unknown or more than half of the shard."""
        before, self._before = self._before, None
        if before is None:
            return None
        positions, values, count = [np.empty(0, np.int64)], [], 0
        for i, old in before.items():
            bits = bits_of(self._parameters[i])
            changed = (bits != old).nonzero().view(-1)
            count += changed.numel()
            if 2 * count > self._starts[-1]:
                self._skip, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
                return None
            values.append(bits[changed].cpu().numpy())
            positions.append(changed.cpu().numpy() + self._starts[i])
        self._pause = 1
        return Changes(np.concatenate(positions), np.concatenate(values or [np.empty(0, np.int32)]))


def _touched(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    if gradient.is_sparse:
        width = gradient.numel() // max(1, gradient.shape[0])
        return gradient._nnz() * width
    return int(torch.count_nonzero(gradient))


@dataclass(frozen=True)
class Routes:
    """How one step's new values are sent.

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


def choose_routes(counts: Sequence[int], numels: Sequence[int], itemsize: int) -> Routes:
    """Find the split between entries and whole parameters that moves the fewest bytes.

    Entries go in one allgather, whose messages are as long as the longest, so every rank pays for the largest of them:
    P times the row, against one broadcast of ``n_r`` elements for each owner left out. The best row length is that of
    one of the owners. ``counts`` are k_r or :data:`UNKNOWN`, ``numels`` n_r.
    """
    sizes = [None if k == UNKNOWN else entries_bytes(n, k, itemsize) for n, k in zip(numels, counts, strict=True)]

    def cost(row: int) -> int:
        left_out = sum(n * itemsize for n, s in zip(numels, sizes, strict=True) if s is None or s > row)
        return len(counts) * row + left_out

    row = min(sorted({0} | {s for s in sizes if s is not None}), key=cost)
    sparse = tuple(r for r, s in enumerate(sizes) if s is not None and 0 < s <= row)
    dense = tuple(r for r, s in enumerate(sizes) if numels[r] and (s is None or s > row))
    return Routes(sparse, dense, row if sparse else 0)


def write_entries(changes: Changes, n: int, row: np.ndarray) -> None:
    """Write an owner's message about its n elements into ``row``, (row_bytes,) uint8; what is left over is zeroed."""
    used = smallest_index_codec(n, changes.positions.size).encode(changes.positions, n, row)
    raw = changes.values.view(np.uint8)
    row[used : used + raw.size] = raw
    row[used + raw.size :] = 0


def read_entries(row: np.ndarray, n: int, k: int, itemsize: int) -> Changes:
    """Read an owner's message of k entries whose values have ``itemsize`` bytes.

    Raises:
        WireError: the message is damaged.
    """
    positions, used = smallest_index_codec(n, k).decode(row, n, k)
    return Changes(positions, row[used : used + k * itemsize].view(f"i{itemsize}"))
