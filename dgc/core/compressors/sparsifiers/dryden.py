"""Dryden's proportional quantisation: the largest positive and the largest negative entries, each as their mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from dgc.core.compressors.base import BucketSpec, PerTensor, StepInfo, Tensor, put, take
from dgc.core.config.schedule import entries_to_send
from dgc.core.kernels.reference import top_k
from dgc.errors import WireError

_HEAD = 12
"""Bytes before the words: the two means and the number of entries."""


class Dryden(PerTensor):
    """A fixed proportion of the positive and of the negative entries, each sent as its mean, with error feedback.

    ``x = g + e``. The n+ρ largest of the n+ positive entries are sent and become their mean μ+, the n-ρ smallest of the
    n- negative ones μ- (at least one of a sign that occurs); ``e = x - μ±`` where sent, x elsewhere. One 32-bit word an
    entry, ``index << 1 | positive``, and two floats a tensor. ρ = 1 - ``sparsity``; its default is LBANN's 1/64.

    Departures: proportions and means are exact instead of sampled, and of a tensor instead of a matrix column.

    Source: Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks", MLHPC.
    """

    name = "dryden"
    number = 4
    source = "Dryden et al. 2016, MLHPC"
    bits = "0.5 at 1/64: 32 an entry + 2 floats a tensor"
    error_feedback = True
    sends_entries = True
    scheduled = True

    @classmethod
    def defaults(cls) -> dict[str, Any]:  # noqa: D102
        return {**super().defaults(), "sparsity": 1 - 1 / 64}

    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:  # noqa: D102
        return tuple(_most(t.n, spec.density) for t in spec.tensors)

    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:  # noqa: D102
        return _HEAD + 4 * _most(tensor.n, spec.density)

    def encode_tensor(  # noqa: D102
        self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> int:
        chosen, means = [], []
        for side in (np.flatnonzero(x > 0), np.flatnonzero(x < 0)):
            values = x[side]
            best = top_k(values, entries_to_send(side.size, spec.density))
            chosen.append(side[best])
            means.append(values[best].mean(dtype=np.float64) if best.size else 0.0)
        words = [(p.astype(np.uint32) << np.uint32(1)) | np.uint32(1 - s) for s, p in enumerate(chosen)]
        largest = float(np.finfo(np.float32).max)
        put(out, 0, np.clip(means, -largest, largest).astype("<f4"))
        put(out, 8, np.array([words[0].size + words[1].size], "<u4"))
        put(out, _HEAD, np.sort(np.concatenate(words)).astype("<u4"))
        return int(words[0].size + words[1].size)

    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> tuple[np.ndarray, np.ndarray]:  # noqa: D102
        means = take(data, 0, 2, "<f4")
        if not np.isfinite(means).all():
            raise WireError("a mean is not finite; the message is damaged")
        words = take(data, _HEAD, int(take(data, 8, 1, "<u4")[0]), "<u4")
        return (words >> 1).astype(np.int64), np.where(words & 1, means[0], means[1])


def _most(n: int, density: float) -> int:
    """The most entries of a tensor: each sign may round up to one."""
    return min(n, int(n * density * (1 + 1e-9)) + 2)
