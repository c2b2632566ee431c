"""Find the factor by which the steps of adaptive optimizers are too short on a rank's own gradient.

An optimizer such as Adam divides by the size of its gradient. A rank's own gradient is noisier than the mean of all
ranks, so its step is too short by sqrt(rho), where

    rho = |mean of the gradients|^2 / mean of |gradient|^2, between 1 / P and 1,

with running means of both squares. rho differs much within a tensor: between the rows of queries, keys and values, or
of frequent and rare words. One rho for a tensor makes steps too long where the ranks agree. So with many ranks rho is
estimated for each piece of :data:`PIECE` elements. On two ranks it is at least 1/2; there one for each tensor learns as
well and saves bytes.

Both squares are estimated by random-sign projections, whose signs are the same on all ranks: the expected square of a
projection of g is |g|^2. If the ranks agree, their projections do, too, and the ratio is exact.

P = ranks, G = groups of elements that have one rho, K = projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.kernels.base import PIECE, Array

# Random projections of each group. The numbers are averaged over many steps.
PROJECTIONS = 2

# The most ranks with one rho for each tensor.
FEW = 2

# The decay of the running means on at most FEW ranks, and on more. A long memory follows too slowly when the ranks
# begin to agree. docs/decisions.md has figures.
_MEMORIES = 0.98, 0.95

_SIGNS = np.array([-1.0, 1.0], np.float32)


class NoiseScale:
    """The projections of one model's gradients, and the factors.

    Attributes:
        groups: for each tensor, the slice of its groups. A tensor has one group, or one for each piece.
        message: (G * (K + 1),) float32: this rank's projections and the sum of their squares before the exchange, the
            means over all ranks after it.
    """

    def __init__(
        self, lengths: Sequence[int], ranks: int, seed: int, convert: Callable[[np.ndarray], Array],
        to_host: Callable[[Array], np.ndarray],
    ) -> None:  # fmt: skip
        """Take each tensor's number of elements.

        ``convert`` turns host arrays into arrays of the gradients' kind; ``to_host`` turns them back.
        """
        self._joins = ranks <= FEW  # the pieces of a tensor
        counts = [1 if self._joins else max(1, -(-n // PIECE)) for n in lengths]
        ends = np.cumsum(counts).tolist()
        self.groups = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.message = np.zeros(sum(counts) * (PROJECTIONS + 1), np.float32)
        self._table = self.message.reshape(-1, PROJECTIONS + 1)
        self._projected = convert(np.zeros((sum(counts), PROJECTIONS), np.float32))
        self._sums = np.zeros((2, sum(counts)))  # running means of the numerator and the denominator
        self._memory = _MEMORIES[0] if self._joins else _MEMORIES[1]
        self._ranks, self._seed, self._convert, self._to_host = ranks, seed, convert, to_host

    def scales(self) -> np.ndarray:
        """Return each group's factor, (G,) float32, between 1 and sqrt(P); 1 where nothing is known."""
        mean, own = self._sums
        rho = np.divide(mean, own, out=np.ones_like(own), where=own > 0)
        factors: np.ndarray = 1.0 / np.sqrt(np.clip(rho, 1.0 / self._ranks, 1.0))
        return factors.astype(np.float32)

    @property
    def shortens(self) -> bool:
        """Whether p is theta + a / s, and not theta + a."""
        return not self._joins

    def measure(self, step: int, gradients: Sequence[Array | None]) -> None:
        """Write the numbers of this rank's gradients, each (n,), into the message."""
        rng = np.random.default_rng((self._seed, step))
        columns = self._convert(rng.choice(_SIGNS, (PROJECTIONS, PIECE)))
        longest = max((len(g) for g in gradients if g is not None and self._joins), default=0)
        rows = self._convert(rng.choice(_SIGNS, longest // PIECE))  # the signs of joined pieces
        self._projected[...] = 0.0
        for g, groups in zip(gradients, self.groups, strict=True):
            if g is None:
                continue
            count = len(g) // PIECE
            full, rest = g[: count * PIECE].reshape(count, PIECE), g[count * PIECE :]
            projected = columns[:, : len(rest)] @ rest
            if self._joins:
                if count:
                    projected = projected + columns @ (rows[:count] @ full)
                self._projected[groups.start] = projected
                continue
            for k in range(PROJECTIONS):  # a product with a matrix of so few columns takes longer
                self._projected[groups.start : groups.start + count, k] = full @ columns[k]
            if len(rest):
                self._projected[groups.stop - 1] = projected
        self._table[:, :PROJECTIONS] = self._to_host(self._projected)  # at once: a device is waited for here
        self._table[:, PROJECTIONS] = np.square(self._table[:, :PROJECTIONS]).sum(axis=1)

    def learn(self) -> None:
        """Update the factors from the means over all ranks, which the message holds after the exchange."""
        mean = np.square(self._table[:, :PROJECTIONS], dtype=np.float64).sum(axis=1)
        kept = self._memory if self._sums.any() else 0.0
        self._sums *= kept
        self._sums += (1 - kept) * np.stack([mean, self._table[:, PROJECTIONS]])

    def to_list(self) -> list[list[float]]:
        """Return the running means as plain numbers."""
        numbers: list[list[float]] = self._sums.tolist()
        return numbers

    def load(self, saved: list[list[float]]) -> None:
        """Load the result of :meth:`to_list`. Begin anew if its groups differ, as with another number of ranks."""
        self._sums[...] = saved if np.shape(saved) == self._sums.shape else 0.0
