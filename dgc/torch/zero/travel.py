"""How updated parameters travel: which owners' as entries, which whole. The same decision on every rank.

P = number of ranks, n_r = elements that rank r owns, k_r = entries that its update changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgc.core.wire import IndexCodec, padded, smallest_index_codec

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
