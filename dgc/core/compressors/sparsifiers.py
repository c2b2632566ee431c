"""Compressors that send selected entries: ``dgc``, ``topk``, ``strom``, ``dryden``, ``adacomp``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from dgc.core.checks import require_choice, require_integer, require_number
from dgc.core.codecs import SPARSE_ID, SparseCodec, check_positions
from dgc.core.compressors.base import (
    Algorithm,
    BucketSpec,
    PerTensor,
    SparseValues,
    StepInfo,
    Tensor,
    as_scale,
    put,
    take,
    take_scales,
)
from dgc.core.config import DGCConfig, entries_to_send
from dgc.core.kernels.reference import top_k
from dgc.errors import WireError

SAMPLE = 100_000  # a global threshold is estimated from about this many entries


class _Selection(Algorithm):
    """Select the k largest entries of each tensor. The exchange may use the kernels' selection instead."""

    error_feedback: ClassVar[bool] = True
    sends_entries: ClassVar[bool] = True
    scheduled: ClassVar[bool] = True
    coded: ClassVar[bool] = True

    def _codec(self, spec: BucketSpec) -> SparseCodec:
        values = "float32" if self.sends_all(spec.density) else self.config.value_codec
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
        codec = self._codec(spec)
        return SparseValues(*codec.decode(data[: codec.max_bytes], count))


class DGC(_Selection):
    """Deep Gradient Compression: send the largest accumulated entries, keep the rest for later.

    ``u <- m*u + G; v <- v + u`` (momentum correction). Of each tensor, the k = n * density entries with the largest
    ``|v|`` are sent. In v and u they become 0 (momentum factor masking).

    Source: Lin et al. 2018, arXiv 1712.01887.
    """

    name = "dgc"
    number = SPARSE_ID
    source = "Lin et al. 2018, arXiv 1712.01887"
    bits = "0.014 at 0.1 %: 14 an entry (elias_fano + int2)"

    @classmethod
    def common_options(cls) -> list[str]:
        """Return all fields of :class:`~dgc.core.config.DGCConfig`, in its order."""
        return [name for name in DGCConfig.__dataclass_fields__ if name not in ("algorithm", "own", "seed")]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return nothing: the defaults are those of :class:`~dgc.core.config.DGCConfig`."""
        return {}

    @classmethod
    @override
    def is_plain_selection(cls, config: DGCConfig) -> bool:
        return True


@dataclass(frozen=True)
class TopkOptions:
    """Options of ``topk``."""

    # "tensor": the k largest entries of each tensor; "global": one threshold for all tensors.
    threshold: Literal["tensor", "global"] = "tensor"
    # With a global threshold, a bucket's message has room for this many times the bucket's even share of entries.
    headroom: float = 1.5

    def __post_init__(self) -> None:
        require_choice("threshold", self.threshold, ("tensor", "global"))
        require_number("headroom", self.headroom, low=1.0, high=1000.0)


class Topk(_Selection):
    """Send the entries above a threshold; the others wait in the residual.

    ``x = g + e``; ``x_i`` is sent if ``|x_i| > t``. t is chosen so that a share R of the entries is held back.

    Departures: with ``threshold="tensor"``, the default here, exactly the k largest entries of each tensor are
    sent, so that messages have a fixed size; the paper prefers one threshold for the model, from a sampled
    quantile. With ``threshold="global"``, t is the R-quantile of about 100 000 entries from all buckets. These are
    sampled in the previous step, because a bucket is sent before the gradients of other buckets are ready. In the
    first step, each bucket samples its own entries. A message then has room for ``headroom`` times the bucket's
    even share of entries. If more entries exceed t, the largest are sent, and the others stay in the residual.

    Source: Aji and Heafield 2017, arXiv 1704.05021. The strided sample is taken from Marian.
    """

    name = "topk"
    number = 2
    source = "Aji and Heafield 2017, arXiv 1704.05021"
    bits = "0.11 at 1 %: 10.6 an entry (elias_fano + int2)"
    Options = TopkOptions

    def __init__(self, config: DGCConfig) -> None:
        super().__init__(config)
        self._samples: dict[int, np.ndarray] = {}
        self._next: float | None = None

    @classmethod
    @override
    def defaults(cls) -> dict[str, Any]:
        return {**super().defaults(), "sparsity": 0.99}

    @classmethod
    @override
    def is_plain_selection(cls, config: DGCConfig) -> bool:
        return bool(config.own.threshold == "tensor")

    @override
    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:
        if self.options.threshold == "tensor":
            return super().max_counts(spec)
        # Rounded up for each tensor, so that the sum is at least the bucket's share.
        share = min(1.0, spec.density * self.options.headroom)
        return tuple(entries_to_send(t.n, share) for t in spec.tensors)

    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        """Encode, and with a global threshold store a sample of x for the next threshold."""
        if self.options.threshold == "tensor":
            return super().encode(x, out, spec, info)
        self._next = None
        stride = max(1, min(1000, spec.total // SAMPLE))
        # The first position changes with the step. Otherwise, a stride that divides a tensor's width would sample the
        # same columns in every step.
        first = info.step % stride
        sample = np.concatenate([np.abs(x[t.slice][min(first, t.n - 1) :: stride]) for t in spec.tensors])
        self._samples[spec.bucket.index] = sample
        threshold = info.thresholds[0, 0]
        if np.isnan(threshold):
            threshold = _quantile(sample, spec.density)
        return self._write(x, _beyond(threshold, x, sum(self.max_counts(spec))), out, spec)

    def finish(self, spec: BucketSpec, thresholds: np.ndarray, *, refused: bool) -> None:
        """Write the next step's threshold into ``thresholds``."""
        if self.options.threshold == "tensor" or refused or not self._samples:
            return
        if self._next is None:
            self._next = _quantile(np.concatenate(list(self._samples.values())), spec.density)
        thresholds[:, 0] = self._next


def _beyond(threshold: float | np.floating[Any], x: np.ndarray, most: int) -> np.ndarray:
    """Return the ascending positions where ``|x|`` is above the threshold; at most those of the ``most`` largest."""
    positions = np.flatnonzero(np.abs(x) > threshold)
    return positions[top_k(x[positions], most)] if positions.size > most else positions


def _quantile(magnitudes: np.ndarray, density: float) -> float:
    """Return the threshold above which a share ``density`` of the sample lies (less if there are ties)."""
    place = max(0, int(magnitudes.size * (1.0 - density)) - 1)
    return float(np.partition(magnitudes, place)[place])


@dataclass(frozen=True)
class StromOptions:
    """Options of ``strom``."""

    # The paper's τ, in units of the gradient. No value suits all models.
    threshold: float = 0.01
    # A message has room for this share of the elements; further entries stay in the residual.
    max_density: float = 0.01

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, low=1e-30, high=1e30)
        require_number("max_density", self.max_density, low=0.0, low_open=True, high=1.0)


class Strom(Algorithm):
    """Send +τ or -τ for entries beyond a fixed threshold τ, with error feedback.

    ``e <- e + g``. If ``e_i > τ``, +τ is sent and ``e_i <- e_i - τ``; if ``e_i < -τ``, -τ is sent and
    ``e_i <- e_i + τ``. So each step sends at most τ of an entry, however large its residual is. An entry takes one
    32-bit word: ``index << 1 | positive``.

    Departures: a message has room for ``max_density`` of the elements, so that ranks need not exchange sizes. If
    more entries are beyond τ, only the largest are sent. The paper's optional entropy code is left out.

    Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech.
    """

    name = "strom"
    number = 3
    source = "Strom 2015, Interspeech"
    bits = "0.32 at 1 %: 32 an entry"
    error_feedback = True
    sends_entries = True
    Options = StromOptions

    @override
    def has_room_for_all(self, spec: BucketSpec) -> bool:
        return bool(self.options.max_density == 1.0)

    @override
    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:
        return tuple(entries_to_send(t.n, self.options.max_density) for t in spec.tensors)

    @override
    def max_bytes(self, spec: BucketSpec) -> int:
        return 4 * sum(self.max_counts(spec))

    @override
    def encode(self, x: np.ndarray, out: np.ndarray, spec: BucketSpec, info: StepInfo) -> tuple[int, int]:
        positions = _beyond(np.float32(self.options.threshold), x, sum(self.max_counts(spec)))
        words = (positions.astype(np.uint32) << np.uint32(1)) | (x[positions] > 0)
        return positions.size, put(out, 0, words.astype("<u4"))

    @override
    def decode(self, data: np.ndarray, count: int, spec: BucketSpec) -> SparseValues:
        words = take(data, 0, count, "<u4")
        positions = (words >> 1).astype(np.int64)
        check_positions(positions, spec.size, self.name)
        spec.bucket.bounds(positions)
        threshold = np.float32(self.options.threshold)
        return SparseValues(positions, np.where(words & 1, threshold, -threshold))


_DRYDEN_HEAD = 12  # bytes before the words: the two means and the number of entries


class Dryden(PerTensor):
    """Send a fixed share of the positive and of the negative entries, as the mean of each, with error feedback.

    ``x = g + e``. The ρ n+ largest of the n+ positive entries are sent as their mean μ+. The ρ n- smallest of the
    n- negative entries are sent as their mean μ-. At least one entry of each sign is sent. ``e = x - μ±`` for sent
    entries, else x. An entry takes one 32-bit word, ``index << 1 | positive``; a tensor takes two floats. ρ is
    1 - ``sparsity``, by default LBANN's 1/64.

    Departures: shares and means are exact instead of sampled, and belong to a tensor instead of a matrix column.

    Source: Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks",
    MLHPC.
    """

    name = "dryden"
    number = 4
    source = "Dryden et al. 2016, MLHPC"
    bits = "0.5 at 1/64: 32 an entry + 2 floats a tensor"
    error_feedback = True
    sends_entries = True
    scheduled = True

    @classmethod
    @override
    def defaults(cls) -> dict[str, Any]:
        return {**super().defaults(), "sparsity": 1 - 1 / 64}

    @override
    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:
        return tuple(_most(t.n, spec.density) for t in spec.tensors)

    @override
    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:
        return _DRYDEN_HEAD + 4 * _most(tensor.n, spec.density)

    @override
    def encode_tensor(self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo) -> int:
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
        put(out, _DRYDEN_HEAD, np.sort(np.concatenate(words)).astype("<u4"))
        return int(words[0].size + words[1].size)

    @override
    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> tuple[np.ndarray, np.ndarray]:
        means = take(data, 0, 2, "<f4")
        if not np.isfinite(means).all():
            raise WireError("a mean is not finite; the message is damaged")
        words = take(data, _DRYDEN_HEAD, int(take(data, 8, 1, "<u4")[0]), "<u4")
        return (words >> 1).astype(np.int64), np.where(words & 1, means[0], means[1])


def _most(n: int, density: float) -> int:
    """Return the most entries that a tensor sends: its share of n, and one entry more for each sign."""
    return min(n, int(n * density * (1 + 1e-9)) + 2)


_ADACOMP_HEAD = 8  # bytes before the units: scale and number of units
_SHORT = 64  # an entry takes 8 bits if its bin is shorter than this, else 16

# A prime, so that each step begins with another bin.
_STRIDE = 65537


@dataclass(frozen=True)
class AdacompOptions:
    """Options of ``adacomp``."""

    # L_T, the elements in a bin of a tensor with more than two dimensions. Up to 63, an entry takes 8 bits.
    conv_bin: int = 50
    # The same for a matrix.
    fc_bin: int = 500
    # A message has room for this many entries per bin on average; further entries stay in the residual.
    entries_per_bin: float = 5.0

    def __post_init__(self) -> None:
        for name in ("conv_bin", "fc_bin"):
            require_integer(name, getattr(self, name), 1, 2**14 - 1)
        require_number("entries_per_bin", self.entries_per_bin, low=1.0, high=float(2**14))


class Adacomp(PerTensor):
    """Adaptive residual compression: a soft threshold in each bin, signs with one scale per tensor.

    ``G = e + dW``; ``H = G + dW``. In each bin of L_T elements, entries with ``|H_i| >= max|G|`` of the bin are
    sent as ``s * sign(G_i)``, where s is the mean of ``max|G|`` over the bins. ``e = G - s * sign(G)`` for sent
    entries, else G. If L_T < 64, an entry takes 8 bits: 6 for the index in its bin, one for the sign, and one that
    ends the bin. Otherwise it takes 16 bits, 14 for the index. An empty bin takes one such unit, unless all later
    bins are empty too.

    Departures: a message has room for ``entries_per_bin`` entries per bin on average (5, which gives the paper's
    rates of 40 for convolutions and 200 for matrices). If that does not suffice, some bins are not sent; each step
    begins at another bin. The paper uses two bits for a ternary value; here one of them ends the bin.

    The method is claimed in the patent US 11,295,208.

    Source: Chen et al. 2018, "AdaComp: adaptive residual gradient compression for data-parallel distributed
    training", AAAI, arXiv 1712.02679.
    """

    name = "adacomp"
    number = 5
    source = "Chen et al. 2018, arXiv 1712.02679"
    bits = "0.8 conv, 0.16 fc: 8 or 16 an entry, 5 entries a bin + 1 float a tensor"
    error_feedback = True
    sends_entries = True
    needs_increment = True
    Options = AdacompOptions
    options: AdacompOptions

    @override
    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:
        return tuple(min(t.n, self._units(t)) for t in spec.tensors)

    @override
    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:
        return _ADACOMP_HEAD + self._units(tensor) * (1 if self._bin(tensor) < _SHORT else 2)

    @override
    def encode_tensor(self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo) -> int:
        assert info.increment is not None
        length, bins = self._bin(tensor), self._bins(tensor)
        g = np.zeros(bins * length, x.dtype)
        g[: tensor.n] = x
        h = g.copy()
        with np.errstate(over="ignore"):
            h[: tensor.n] += info.increment[tensor.slice]
        g, h = g.reshape(bins, length), h.reshape(bins, length)
        largest = np.abs(g).max(1)
        # In a bin of zeros, every entry equals the bin's largest one, but zeros have no sign to send.
        send = (np.abs(h) >= largest[:, None]) & (g != 0)
        first = (info.step + info.rank) * _STRIDE % bins
        fitting = _fit(send.sum(1), self._units(tensor) - bins, first)
        send &= fitting[:, None]
        scale = as_scale(float(largest.mean(dtype=np.float64)))
        rows, columns = np.nonzero(send)
        units = self._write(rows, columns, g[rows, columns] > 0, length)
        put(out, 0, np.array([scale], "<f4"))
        put(out, 4, np.array([units.size], "<u4"))
        put(out, _ADACOMP_HEAD, units)
        return rows.size

    @override
    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> tuple[np.ndarray, np.ndarray]:
        length = self._bin(tensor)
        dtype, bits = _unit(length)
        scale = take_scales(data, 1)[0]
        units = take(data, _ADACOMP_HEAD, int(take(data, 4, 1, "<u4")[0]), dtype).astype(np.int64)
        empty = (1 << bits) - 1
        index, positive, last = units & empty, units >> bits & 1, units >> bits + 1
        bin_of = np.cumsum(last) - last
        marker = index == empty
        alone = np.ones(units.size, bool)
        alone[1:] = last[:-1] == 1
        if (marker & ((last == 0) | ~alone)).any() or (~marker & (index >= length)).any():
            raise WireError(f"no sender writes such entries of {tensor.name!r}; the message is damaged")
        sent = ~marker
        positions = (bin_of * length + index)[sent]
        return positions, np.where(positive[sent] == 1, scale, -scale)

    def _bin(self, tensor: Tensor) -> int:
        return self.options.conv_bin if len(tensor.shape) > 2 else self.options.fc_bin

    def _bins(self, tensor: Tensor) -> int:
        return -(-tensor.n // self._bin(tensor))

    def _units(self, tensor: Tensor) -> int:
        """Return how many units a message has room for. A single bin can always send all its entries."""
        bins = self._bins(tensor)
        return max(math.ceil(self.options.entries_per_bin * bins), bins + min(self._bin(tensor), tensor.n))

    @staticmethod
    def _write(rows: np.ndarray, columns: np.ndarray, positive: np.ndarray, length: int) -> np.ndarray:
        """Return units for the entries, which are sorted by bin, and for the empty bins before the last entry."""
        dtype, bits = _unit(length)
        if rows.size == 0:
            return np.empty(0, dtype)
        last = np.ones(rows.size, np.int64)
        last[:-1] = rows[1:] != rows[:-1]
        units = columns | positive.astype(np.int64) << bits | last << bits + 1
        empty = np.setdiff1d(np.arange(rows[-1]), rows)
        order = np.argsort(np.concatenate([rows, empty]), kind="stable")
        marker = np.full(empty.size, ((1 << bits) - 1) | 1 << bits + 1, np.int64)
        return np.concatenate([units, marker])[order].astype(dtype)


def _unit(length: int) -> tuple[str, int]:
    """Return the type of a unit, and the bits of its index; the largest index marks an empty bin."""
    return ("u1", 6) if length < _SHORT else ("<u2", 14)


def _fit(counts: np.ndarray, capacity: int, first: int) -> np.ndarray:
    """Return which bins may send, (bins,) bool, beginning with bin ``first``.

    Each bin has room for one entry; all bins together have room for ``capacity`` more.
    """
    extra = np.roll(np.maximum(counts - 1, 0), -first)
    return np.roll((np.cumsum(extra) <= capacity) | (extra == 0), first)
