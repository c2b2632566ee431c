"""Gradients of several passes, added up on this rank before they are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from dgc.tensorflow.engine.numpy_bridge import ACCUMULATED, APPLY, Step, still_there


class Sums:
    """``backward_passes_per_step`` of one reducer.

    Attributes:
        passes: so many gradients make one sum.
        passed: of the sum under way; 0 when there is none.
    """

    def __init__(self, passes: int, average: bool) -> None:
        """Begin with nothing; ``average`` divides a sum by the number of its passes."""
        self.passes, self.passed = passes, 0
        self._factor = 1.0 / passes if average else 1.0
        self._sums: list[np.ndarray] = []
        self._generation: int | None = None

    def add(self, arrays: Sequence[np.ndarray], generation: int = 0) -> list[np.ndarray]:
        """Add one pass; after the last one ``passed`` is 0 again and the result complete.

        Args:
            arrays: a gradient of each variable, always the same ones.
            generation: a change of it drops what was added up: after an error in the midst of the passes the ranks may
                have come to different ones.

        Returns:
            The sums so far, float32 (float64 for float64).
        """
        if generation != self._generation:
            self._generation, self.passed = generation, 0
        if self.passed == 0:
            self._sums = [np.zeros(a.shape, np.float64 if a.dtype == np.float64 else np.float32) for a in arrays]
        for total, array in zip(self._sums, arrays, strict=True):
            np.add(total, array, out=total, casting="same_kind")
        self.passed = (self.passed + 1) % self.passes
        if self.passed:
            # Never the sums themselves: TensorFlow keeps what it is given, and they go on changing.
            return [total.copy() for total in self._sums]
        sums, self._sums = self._sums, []
        for total in sums:
            total *= total.dtype.type(self._factor)
        return sums


def adding_step(sums: Sums) -> Step:
    """A step that only adds up: ACCUMULATED, or APPLY after the last pass. It holds no sums: a graph keeps it."""
    reference = weakref.ref(sums)

    def step(arrays: list[np.ndarray], *_: object) -> tuple[list[np.ndarray], int]:
        total = still_there(reference)
        added = total.add(arrays)
        return added, ACCUMULATED if total.passed else APPLY

    return step
