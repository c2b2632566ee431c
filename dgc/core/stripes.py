"""Which rank owns which positions of a bucket, where ranks add up entries for each other.

The positions are dealt in stripes of consecutive elements. A *round* is one stripe for each rank; every round begins
with another rank, because the rows of a matrix are often a multiple of a round long, and large entries share columns.
P = number of ranks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from dgc.core.layout import ALIGNMENT, Bucket, Segment

# Elements of a stripe: a multiple of the alignment, so that each tensor's part of a rank's stripes is aligned too.
STRIPE = 2 * ALIGNMENT

_MIXER = 2654435761  # Knuth's multiplicative hash, section 6.4 of The Art of Computer Programming


def owners_of(positions: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank that owns each of (k,) positions of a bucket, as uint16, which sorts fast."""
    stripes = positions // STRIPE
    owners: np.ndarray = (stripes + _shift(stripes // ranks)) % ranks
    return owners.astype(np.uint16)


def _shift(rounds: Any) -> Any:
    """Return the number, any number >= 0, by which the owners of (n,) rounds, or of one round, are rotated."""
    return (rounds * _MIXER & 0xFFFFFFFF) >> 16


class Stripes:
    """The positions of a bucket that one rank owns, numbered from 0 in their order: their *places*.

    It has what codecs ask of a bucket.

    Attributes:
        sparse_size: number of places; the same on all ranks, so that a few may lie behind the bucket's end.
        sparse: the bucket's sparsified tensors.
    """

    def __init__(self, bucket: Bucket, rank: int, ranks: int) -> None:
        self.bucket, self.rank, self.ranks = bucket, rank, ranks
        self.sparse = bucket.sparse
        self.sparse_size = -(-bucket.sparse_size // (STRIPE * ranks)) * STRIPE

    def positions(self, places: np.ndarray) -> np.ndarray:
        """Return the positions in the bucket of (n,) int64 places."""
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
        """See :meth:`dgc.core.layout.Bucket.bounds`."""
        return self.bucket.bounds(self.positions(places))

    @cached_property
    def slices(self) -> dict[Segment, slice]:
        """The places of each sparsified tensor."""
        return {s: slice(self._below(s.offset), self._below(s.slice.stop)) for s in self.sparse}

    def _below(self, position: int) -> int:
        """Return how many owned positions lie below a position."""
        round_, rest = divmod(position, STRIPE * self.ranks)
        before = (self.rank - _shift(round_)) % self.ranks * STRIPE
        return round_ * STRIPE + int(min(max(rest - before, 0), STRIPE))
