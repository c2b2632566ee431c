"""Find the factor by which the steps of adaptive optimizers are too short on a rank's own gradient.

An optimizer such as Adam divides by the size of its gradient. A rank's own gradient is noisier than the mean of all
ranks, so its step is too short by sqrt(rho), where

    rho = |mean of the gradients|^2 / |gradient|^2, between 1 / P and 1.

rho differs much within a tensor: between the rows of queries, keys and values, or of frequent and rare words. One rho
for a tensor makes steps too long where the ranks agree. So with many ranks rho is estimated for each piece of
:data:`PIECE` elements. On two ranks it is at least 1/2, and one for each tensor learns as well and saves bytes.

Both squares are estimated by random-sign projections, whose signs are the same on all ranks: the expected square of a
projection of g is |g|^2. Only the projections travel. If the ranks agree, their projections do, too, and the ratio is
exact.

P = ranks, M = pieces, G = groups of pieces that have one rho, K = projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.kernels.base import PIECE, Array

# Projections of each group.
PROJECTIONS = 2

# The most ranks with one rho for each tensor.
_FEW = 2

# The decay of the averages of squared projections, for few ranks and for more. A long memory follows too slowly when
# the ranks begin to agree. docs/decisions.md has figures.
_MEMORIES = 0.98, 0.95

_SIGNS = np.array([-1.0, 1.0], np.float32)


class NoiseScale:
    """The projections of one model's gradients, and the factors.

    Attributes:
        pieces: each tensor's pieces.
        message: (G * K,) float32: this rank's projections before the exchange, the means over all ranks after it.
    """

    def __init__(
        self, lengths: Sequence[int], ranks: int, seed: int, convert: Callable[[np.ndarray], Array],
        to_host: Callable[[Array], np.ndarray],
    ) -> None:  # fmt: skip
        """Take each tensor's number of elements.

        ``convert`` turns host arrays into arrays of the gradients' kind; ``to_host`` turns them back.
        """
        counts = [max(1, -(-n // PIECE)) for n in lengths]
        self.pieces = _slices(counts)
        self._projected = convert(np.zeros((sum(counts), PROJECTIONS), np.float32))
        self._joins = ranks <= _FEW  # the pieces of a tensor
        self._sizes = counts if self._joins else [1] * sum(counts)  # pieces of each group
        self._groups = _slices([1] * len(counts)) if self._joins else self.pieces
        self._memory = _MEMORIES[0] if self._joins else _MEMORIES[1]
        groups = len(self._sizes)
        self.message = np.zeros(groups * PROJECTIONS, np.float32)
        self._sums = np.zeros((2, groups))  # running means of the squares of the mean and of this rank's gradient
        self._own = np.zeros(groups)  # the latter of the step that is under way
        self._ranks, self._seed, self._convert, self._to_host = ranks, seed, convert, to_host

    def scales(self) -> np.ndarray:
        """Return each piece's factor, (M,) float32, between 1 and sqrt(P); 1 where nothing is known."""
        mean, own = self._sums
        rho = np.divide(mean, own, out=np.ones_like(own), where=own > 0)
        factors = (1.0 / np.sqrt(np.clip(rho, 1.0 / self._ranks, 1.0))).astype(np.float32)
        return np.repeat(factors, self._sizes)

    def measure(self, step: int, gradients: Sequence[Array | None]) -> None:
        """Write the projections of this rank's gradients, each (n,), into the message."""
        rng = np.random.default_rng((self._seed, step))
        signs = self._convert(rng.choice(_SIGNS, (PIECE, PROJECTIONS)))
        self._projected[...] = 0.0
        for g, pieces in zip(gradients, self.pieces, strict=True):
            if g is None:
                continue
            count = len(g) // PIECE
            if count:
                full = slice(pieces.start, pieces.start + count)
                self._projected[full] = g[: count * PIECE].reshape(count, PIECE) @ signs
            if rest := len(g) % PIECE:
                self._projected[pieces.stop - 1] = g[count * PIECE :] @ signs[:rest]
        table = self._to_host(self._projected)  # at once: a device is waited for here
        if self._joins:
            table = table * rng.choice(_SIGNS, (len(table), 1))
            table = np.add.reduceat(table, [pieces.start for pieces in self.pieces])
        self.message[...] = table.reshape(-1)
        self._own = np.square(table, dtype=np.float64).sum(axis=1)
        for g, groups in zip(gradients, self._groups, strict=True):
            if g is None:  # the optimizer's own mean of squares stays as well
                self._own[groups] = self._sums[1][groups]

    def learn(self) -> None:
        """Update the factors from the means over all ranks, which the message holds after the exchange."""
        mean = np.square(self.message.reshape(-1, PROJECTIONS), dtype=np.float64).sum(axis=1)
        kept = self._memory if self._sums.any() else 0.0
        self._sums *= kept
        self._sums += (1 - kept) * np.stack([mean, self._own])

    def average(self, transport: Transport) -> int:
        """Make the factors equal on all ranks; return the number of bytes that this rank has sent. Collective."""
        own = self._sums[1]
        transport.allreduce(own, "sum")
        own /= self._ranks
        return int(own.nbytes)

    def to_list(self) -> list[list[float]]:
        """Return the running means as plain numbers."""
        numbers: list[list[float]] = self._sums.tolist()
        return numbers

    def load(self, saved: list[list[float]]) -> None:
        """Load the result of :meth:`to_list`. Begin anew if it is that of so many ranks that the groups differ."""
        self._sums[...] = saved if np.shape(saved) == self._sums.shape else 0.0


def _slices(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
