"""The family that sends exact entries: ``dgc``, and ``topk`` (Aji and Heafield)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dgc.core.compressors.base import Algorithm, BucketSpec, SparseValues, StepInfo
from dgc.core.config.checks import require_choice, require_number
from dgc.core.config.config import DGCConfig
from dgc.core.config.schedule import entries_to_send
from dgc.core.kernels.reference import top_k
from dgc.core.wire.payload import SPARSE_ID, SparseCodec
from dgc.errors import WireError

SAMPLE = 100_000
"""Entries that a global threshold is estimated from, about."""


class _Selection(Algorithm):
    """The k largest entries of each tensor, done by :class:`~dgc.core.exchange.encoders.topk.TopKEncoder` itself."""

    error_feedback: ClassVar[bool] = True
    sends_entries: ClassVar[bool] = True
    scheduled: ClassVar[bool] = True
    coded: ClassVar[bool] = True

    def _codec(self, spec: BucketSpec) -> SparseCodec:
        values = spec.bucket.dtype if self.sends_all(spec.density) else self.config.values
        return SparseCodec(spec.bucket, sum(self.max_counts(spec)), self.config.indices, values)

    def codec_ids(self, spec: BucketSpec) -> tuple[int, int]:
        codec = self._codec(spec)
        return int(codec.indices.id), int(codec.values.id)

    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:
        return tuple(entries_to_send(t.n, spec.density) for t in spec.tensors)

    def max_bytes(self, spec: BucketSpec) -> int:
        return self._codec(spec).max_bytes

    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        counts = zip(spec.tensors, self.max_counts(spec), strict=True)
        positions = np.concatenate([t.offset + top_k(x[t.slice], k) for t, k in counts])
        return self._write(x, positions, out, spec)

    def _write(self, x: np.ndarray, positions: np.ndarray, out: np.ndarray, spec: BucketSpec) -> tuple[int, int]:
        codec = self._codec(spec)
        codec.encode(positions, x[positions], out[: codec.max_bytes])
        return positions.size, codec.max_bytes

    def decode(self, data: np.ndarray, count: int, spec: BucketSpec) -> SparseValues:
        if count > sum(self.max_counts(spec)):
            raise WireError(f"a message with {count} entries came, at most {sum(self.max_counts(spec))} were expected")
        codec = self._codec(spec)
        positions, values = codec.decode(data[: codec.max_bytes], count)
        spec.check_positions(positions)
        return SparseValues(positions, values)


class DGC(_Selection):
    """Deep Gradient Compression: the k largest entries of each tensor, with momentum correction and masking.

    ``u <- m*u + G; v <- v + u``; the k = n * density entries of largest ``|v|`` are sent.

    Source: Lin et al. 2018, arXiv 1712.01887.
    """

    name = "dgc"
    number = SPARSE_ID
    source = "Lin et al. 2018, arXiv 1712.01887"
    bits = "0.014 at 0.1 %: 14 an entry (elias_fano + int2)"

    @classmethod
    def common_options(cls) -> list[str]:
        """All of :class:`~dgc.core.config.config.DGCConfig`, in its order, and ``steps``, which chooses some."""
        return [*(name for name in DGCConfig.__dataclass_fields__ if name not in ("algorithm", "own")), "steps"]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Those of :class:`~dgc.core.config.config.DGCConfig`: momentum is adopted."""
        return {}

    @classmethod
    def is_plain_selection(cls, config: DGCConfig) -> bool:  # noqa: D102
        return True


@dataclass(frozen=True)
class TopkOptions:
    """Options of ``topk``."""

    threshold: str = "tensor"
    """"tensor": the k largest entries of each tensor; "global": one threshold for all tensors."""
    headroom: float = 1.5
    """With a global threshold, room in a bucket's message for this many times the entries of an even share."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_choice("threshold", self.threshold, ("tensor", "global"))
        require_number("headroom", self.headroom, low=1.0, high=1000.0)


class Topk(_Selection):
    """Sparse gradient exchange: entries above a threshold are sent, the others wait in the residual.

    ``x = g + e``; send ``x_i`` where ``|x_i| > t``, with t such that the share R (default 99 %) is dropped.

    Departures from the paper: with ``threshold="tensor"`` (the default here; the paper prefers one threshold for the
    whole model) the k largest are chosen exactly instead of by a sampled quantile, so messages have a fixed size.
    With ``threshold="global"`` t is the R-quantile of about 100 000 entries of all buckets, taken in the step
    before (in the first step: of the bucket's own), since a bucket leaves before the gradients of the others are there;
    a message has room for ``headroom`` times the entries of an even share, the largest are preferred, and the rest
    waits. Values are sent in ``values=``.

    Source: Aji and Heafield 2017, arXiv 1704.05021; the strided sample is Marian's.
    """

    name = "topk"
    number = 2
    source = "Aji and Heafield 2017, arXiv 1704.05021"
    bits = "0.11 at 1 %: 10.6 an entry (elias_fano + int2)"
    Options = TopkOptions

    def __init__(self, config: DGCConfig) -> None:
        """Begin without a sample."""
        super().__init__(config)
        self._samples: dict[int, np.ndarray] = {}
        self._next: float | None = None

    @classmethod
    def defaults(cls) -> dict[str, Any]:  # noqa: D102
        return {**super().defaults(), "sparsity": 0.99}

    @classmethod
    def is_plain_selection(cls, config: DGCConfig) -> bool:  # noqa: D102
        return bool(config.own.threshold == "tensor")

    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:  # noqa: D102
        if self.options.threshold == "tensor":
            return super().max_counts(spec)
        # Rounded up for each tensor, so that their sum, which is what counts, is at least the bucket's share.
        share = min(1.0, spec.density * self.options.headroom)
        return tuple(entries_to_send(t.n, share) for t in spec.tensors)

    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        """See the base class; a sample of x is kept for the next threshold."""
        if self.options.threshold == "tensor":
            return super().encode(x, out, spec, info)
        self._next = None
        stride = max(1, min(1000, spec.total // SAMPLE))
        # The first place changes with the step, or a stride that divides a tensor's width would see a few columns only.
        first = info.step % stride
        sample = np.concatenate([np.abs(x[t.slice][min(first, t.n - 1) :: stride]) for t in spec.tensors])
        self._samples[spec.bucket.index] = sample
        threshold = info.thresholds[0, 0]
        if np.isnan(threshold):
            threshold = _quantile(sample, spec.density)
        positions = np.flatnonzero(np.abs(x) > threshold)
        most = sum(self.max_counts(spec))
        if positions.size > most:
            positions = positions[top_k(x[positions], most)]
        return self._write(x, positions, out, spec)

    def finish(self, spec: BucketSpec, thresholds: np.ndarray, *, refused: bool) -> None:
        """Write the next step's threshold where a checkpoint finds it."""
        if self.options.threshold == "tensor" or refused or not self._samples:
            return
        if self._next is None:
            self._next = _quantile(np.concatenate(list(self._samples.values())), spec.density)
        thresholds[:, 0] = self._next


def _quantile(magnitudes: np.ndarray, density: float) -> float:
    """The value that the share ``density`` of the sample exceeds (fewer where there are ties)."""
    place = max(0, int(magnitudes.size * (1.0 - density)) - 1)
    return float(np.partition(magnitudes, place)[place])
