"""What the sizes of a bucket's exchange follow from, and what they cost. P = number of ranks.

All ranks compute the same sizes and costs without asking each other, and so does a resumed run.
"""

from __future__ import annotations

from typing import NamedTuple

from dgc.core.compressors import compressor_class
from dgc.core.config import DGCConfig
from dgc.core.layout import Bucket

# A collective costs as much as this many bytes through a rank, besides its own bytes: about 50 us at 10 Gbit/s.
COLLECTIVE_BYTES = 64 * 1024

INLINE_MAX_BYTES = 1024 * 1024  # larger vectors are summed by allreduce, which needs no buffer for P copies


class Setting(NamedTuple):
    """A bucket at one density, or in a step without compression (None), in a job of P ranks.

    Sizes do not follow from ``rank``, which is this rank.
    """

    bucket: Bucket
    config: DGCConfig
    density: float | None
    ranks: int
    rank: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether tensors are sent uncompressed: in steps without compression, and always if sparsity is 0."""
        return self.density is None or compressor_class(self.config.algorithm).sends_all(self.density)

    @property
    def values(self) -> str:
        """The codec of values."""
        return "float32" if self.is_exact else self.config.value_codec

    @property
    def small(self) -> str:
        """The codec of small tensors."""
        return "float32" if self.is_exact else self.config.small


class Traffic(NamedTuple):
    """What passes through a rank in one step.

    The sizes are those of rings: the bytes of every other rank pass through a rank, or in an allreduce, 2 (P - 1) / P
    of the vector.

    Attributes:
        rounds: rounds of rings.
        nbytes: bytes that it receives and sends on.
        collectives: how many collectives there are.
    """

    rounds: int
    nbytes: float
    collectives: int

    @property
    def cost(self) -> float:
        """The cost in bytes; see :data:`COLLECTIVE_BYTES`."""
        return self.nbytes + COLLECTIVE_BYTES * self.collectives

    def then(self, other: Traffic) -> Traffic:
        """Return the traffic of both."""
        nbytes = self.nbytes + other.nbytes
        return Traffic(self.rounds + other.rounds, nbytes, self.collectives + other.collectives)


def gathering(nbytes: int, ranks: int) -> Traffic:
    """Return the traffic of an allgather of messages, or of an alltoall of parts, of ``nbytes`` each."""
    return Traffic(ranks - 1, (ranks - 1) * nbytes, 1)


def reducing(nbytes: int, ranks: int) -> Traffic:
    """Return the traffic of an allreduce of a vector of ``nbytes``."""
    return Traffic(2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes, 1)


def fits_inside(inside: int, reduced: int, ranks: int) -> bool:
    """Return whether a vector is sent inside the message, in ``inside`` bytes, and not by an allreduce.

    The message is sent in any case, so its collective costs nothing more.
    """
    return inside <= INLINE_MAX_BYTES and gathering(inside, ranks).nbytes <= reducing(reduced, ranks).cost
