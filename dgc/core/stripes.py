"""Assign each position of a bucket to a rank, its owner, which adds up the position's entries for all ranks.

The positions are divided into stripes of consecutive elements. A *round* is one stripe for each rank. A hash of the
round's number chooses the rank that begins it. Otherwise, in a matrix whose row is a multiple of a round, each column
would have a single owner, and some owners would get most entries, because large entries share columns. P = number of
ranks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from dgc.core.layout import ALIGNMENT, Bucket, Segment, bounds_of

# Elements in a stripe: a multiple of the alignment, so that each tensor's part of a rank's stripes is aligned, too.
STRIPE = 2 * ALIGNMENT

_MIXER = 2654435761  # Knuth's multiplicative hash, section 6.4 of The Art of Computer Programming


def owners_of(positions: np.ndarray, ranks: int) -> np.ndarray:
    """Return the owner of each of (k,) positions of a bucket, as uint16, which sorts fast."""
    stripes = positions // STRIPE
    owners: np.ndarray = (stripes + _shift(stripes // ranks)) % ranks
    return owners.astype(np.uint16)


def _shift(rounds: Any) -> Any:
    """Return by how many ranks each round's owners are rotated. ``rounds`` is a round's number, or (n,) numbers."""
    return (rounds * _MIXER & 0xFFFFFFFF) >> 16


class Stripes:
    """The positions of a bucket that one rank owns. Numbered from 0 in their order, they are its *places*.

    It has the attributes of a bucket that codecs use.

    Attributes:
        sparse_size: the number of places. It is the same on all ranks, so a few places may lie beyond the bucket.
        sparse: the bucket's sparsified tensors.
        small: the rank's span of the bucket's small tensors, which are divided into one piece for each rank.
    """

    def __init__(self, bucket: Bucket, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.sparse = bucket.sparse
        self.sparse_size = -(-bucket.sparse_size // (STRIPE * ranks)) * STRIPE
        piece = -(-bucket.small_size // (ALIGNMENT * ranks)) * ALIGNMENT
        first, stop = (min(r * piece, bucket.small_size) for r in (rank, rank + 1))
        self.small = slice(first, stop)

    def positions(self, places: np.ndarray) -> np.ndarray:
        """Convert places, (n,) int64, to positions in the bucket, and return these."""
        rounds = places // STRIPE
        positions: np.ndarray = (
            rounds * self.ranks + (self.rank - _shift(rounds)) % self.ranks
        ) * STRIPE + places % STRIPE
        return positions

    def places(self, positions: np.ndarray) -> np.ndarray:
        """Return the places of (n,) int64 positions that this rank owns."""
        places: np.ndarray = positions // (STRIPE * self.ranks) * STRIPE + positions % STRIPE
        return places

    def bounds(self, places: np.ndarray) -> np.ndarray:
        """Split ascending places by tensor, as :meth:`dgc.core.layout.Bucket.bounds` does."""
        return bounds_of(places, *self._ends)

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(S + 1,) int64: where each sparsified tensor begins, then ``sparse_size``. (S,): where each tensor ends."""
        places = list(self.slices.values())
        starts = np.array([*(each.start for each in places), self.sparse_size], np.int64)
        return starts, np.array([each.stop for each in places], np.int64)

    @cached_property
    def slices(self) -> dict[Segment, slice]:
        """The places of each sparsified tensor."""
        return {s: slice(self._below(s.offset), self._below(s.slice.stop)) for s in self.sparse}

    def _below(self, position: int) -> int:
        """Return the number of positions below ``position`` that this rank owns."""
        round_, rest = divmod(position, STRIPE * self.ranks)
        before = (self.rank - _shift(round_)) % self.ranks * STRIPE
        return round_ * STRIPE + int(min(max(rest - before, 0), STRIPE))
