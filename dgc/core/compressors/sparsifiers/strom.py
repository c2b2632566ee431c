"""Strom's threshold quantisation: plus or minus one fixed value where the residual is beyond it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgc.core.compressors.base import Algorithm, BucketSpec, SparseValues, StepInfo, put, take
from dgc.core.config.checks import require_number
from dgc.core.config.schedule import entries_to_send
from dgc.core.kernels.reference import top_k
from dgc.errors import WireError


@dataclass(frozen=True)
class StromOptions:
    """Options of ``strom``."""

    threshold: float = 0.01
    """The τ of the paper, in units of the gradient; there is no value that suits all models."""
    max_density: float = 0.01
    """Room in a message, as a share of the elements; entries beyond it wait."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_number("threshold", self.threshold, low=1e-30, high=1e30)
        require_number("max_density", self.max_density, low=0.0, low_open=True, high=1.0)


class Strom(Algorithm):
    """Entries beyond a fixed threshold are sent as the threshold, with error feedback.

    ``e <- e + g``; where ``e_i > τ`` send +τ and ``e_i <- e_i - τ``, where ``e_i < -τ`` send -τ and ``e_i <- e_i + τ``:
    at most τ an entry and step, however large the residual. One 32-bit word an entry: ``index << 1 | positive``.

    Departures: messages have room for ``max_density`` of the elements, so that no sizes are exchanged; when more are
    beyond τ, the largest go first. The optional entropy code of the gaps is left out.

    Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech.
    """

    name = "strom"
    number = 3
    source = "Strom 2015, Interspeech"
    bits = "0.32 at 1 %: 32 an entry"
    error_feedback = True
    sends_entries = True
    Options = StromOptions

    def has_room_for_all(self, spec: BucketSpec) -> bool:  # noqa: D102
        return bool(self.options.max_density == 1.0)

    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:  # noqa: D102
        return tuple(entries_to_send(t.n, self.options.max_density) for t in spec.tensors)

    def max_bytes(self, spec: BucketSpec) -> int:  # noqa: D102
        return 4 * sum(self.max_counts(spec))

    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:  # noqa: D102
        positions = np.flatnonzero(np.abs(x) > np.float32(self.options.threshold))
        most = sum(self.max_counts(spec))
        if positions.size > most:
            positions = positions[top_k(x[positions], most)]
        words = (positions.astype(np.uint32) << np.uint32(1)) | (x[positions] > 0)
        return positions.size, put(out, 0, words.astype("<u4"))

    def decode(self, data: np.ndarray, count: int, spec: BucketSpec) -> SparseValues:  # noqa: D102
        if count > sum(self.max_counts(spec)):
            raise WireError(f"a message with {count} entries came, at most {sum(self.max_counts(spec))} were expected")
        words = take(data, 0, count, "<u4")
        positions = (words >> 1).astype(np.int64)
        spec.check_positions(positions)
        threshold = np.float32(self.options.threshold)
        return SparseValues(positions, np.where(words & 1, threshold, -threshold))
