"""Find the factor by which the steps of adaptive optimizers are too short on a rank's own gradient.

An optimizer such as Adam divides by the size of its gradient. A rank's own gradient is noisier than the mean of all
ranks, so its step is too short by sqrt(rho), where

    rho = |mean of the gradients|^2 / |gradient|^2, between 1 / P and 1.

rho differs much within a tensor: between the rows of queries, keys and values, or of frequent and rare words. So it is
estimated for each piece of :data:`PIECE` elements. One rho for each tensor makes large gradients, on which the ranks
agree, too large.

Both squares are estimated by random-sign projections, whose signs are the same on all ranks: the expected square of a
projection of g is |g|^2. Only the projections travel. If the ranks agree, their projections do, too, and the ratio is
exact.

P = ranks, M = pieces, K = projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dgc.core.kernels.base import PIECE, Array
from dgc.errors import LayoutError

# Projections of each piece.
PROJECTIONS = 2

# The decay of the averages of their squares. A longer memory follows too slowly when the ranks begin to agree: with
# 0.98, 16 ranks ended 7.5 instead of 0.9 % behind dense.
_MEMORY = 0.95


class NoiseScale:
    """The projections of one model's gradients, and the factors.

    Attributes:
        pieces: each tensor's pieces.
        message: (M * K,) float32: this rank's projections before the exchange, the means over all ranks after it.
    """

    def __init__(
        self, lengths: Sequence[int], ranks: int, seed: int, convert: Callable[[np.ndarray], Array],
        to_host: Callable[[Array], np.ndarray],
    ) -> None:  # fmt: skip
        """Take each tensor's number of elements.

        ``convert`` turns host arrays into arrays of the gradients' kind; ``to_host`` turns them back.
        """
        ends = np.cumsum([-(-n // PIECE) for n in lengths], dtype=int).tolist()
        self.pieces = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        count = ends[-1] if ends else 0
        self.message = np.zeros(count * PROJECTIONS, np.float32)
        self._projected = convert(np.zeros((count, PROJECTIONS), np.float32))
        self._sums = np.zeros((2, count))  # running means of the squares of the mean and of this rank's gradient
        self._own = np.zeros(count)  # the latter of the step that is under way
        self._ranks, self._seed, self._convert, self._to_host = ranks, seed, convert, to_host

    def scales(self) -> np.ndarray:
        """Return each piece's factor, (M,) float32, between 1 and sqrt(P); 1 where nothing is known."""
        mean, own = self._sums
        rho = np.divide(mean, own, out=np.ones_like(own), where=own > 0)
        return (1.0 / np.sqrt(np.clip(rho, 1.0 / self._ranks, 1.0))).astype(np.float32)

    def measure(self, step: int, gradients: Sequence[Array | None]) -> None:
        """Write the projections of this rank's gradients, each (n,), into the message."""
        rng = np.random.default_rng((self._seed, step))
        signs = self._convert(rng.choice(np.array([-1.0, 1.0], np.float32), (PIECE, PROJECTIONS)))
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
        self.message[...] = table.reshape(-1)
        self._own = np.square(table, dtype=np.float64).sum(axis=1)
        for g, pieces in zip(gradients, self.pieces, strict=True):
            if g is None:  # the optimizer's own mean of squares stays as well
                self._own[pieces] = self._sums[1][pieces]

    def learn(self) -> None:
        """Update the factors from the means over all ranks, which the message holds after the exchange."""
        mean = np.square(self.message.reshape(-1, PROJECTIONS), dtype=np.float64).sum(axis=1)
        kept = _MEMORY if self._sums.any() else 0.0
        self._sums *= kept
        self._sums += (1 - kept) * np.stack([mean, self._own])

    def to_list(self) -> list[list[float]]:
        """Return the running means as plain numbers."""
        numbers: list[list[float]] = self._sums.tolist()
        return numbers

    def require_fit(self, saved: list[list[float]]) -> None:
        """Raise a LayoutError if :meth:`load` cannot load this."""
        sums = np.asarray(saved)
        if sums.shape != self._sums.shape or not np.isfinite(sums).all():
            raise LayoutError("the saved noise scale does not fit, or is not finite: the file is damaged")

    def load(self, saved: list[list[float]]) -> None:
        """Load the result of :meth:`to_list`."""
        self._sums[...] = saved
