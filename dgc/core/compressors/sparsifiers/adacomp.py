"""AdaComp: in each bin of a tensor, the entries that this step's gradient could lift to the bin's largest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dgc.core.compressors.base import BucketSpec, PerTensor, StepInfo, Tensor, as_scale, put, take, take_scales
from dgc.core.config.checks import require_integer, require_number
from dgc.errors import WireError

_HEAD = 8
"""Bytes before the units: scale and number of units."""
_SHORT = 64
"""Bins below this many elements take 8 bits an entry, longer ones 16."""

_STRIDE = 65537
"""A prime, so that the bin that is served first wanders over all bins from step to step."""


@dataclass(frozen=True)
class AdacompOptions:
    """Options of ``adacomp``."""

    conv_bin: int = 50
    """Elements in a bin, L_T, of a tensor with more than two dimensions; up to 63 an entry takes 8 bits."""
    fc_bin: int = 500
    """The same for a matrix."""
    entries_per_bin: float = 5.0
    """Room in a message: so many entries a bin on average; what finds no room waits."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for name in ("conv_bin", "fc_bin"):
            value = getattr(self, name)
            require_integer(name, value, 1)
            require_number(name, value, low=1, high=2**14 - 1)
        require_number("entries_per_bin", self.entries_per_bin, low=1.0, high=float(2**14))


class Adacomp(PerTensor):
    """Adaptive residual gradient compression: a soft threshold in each bin, signs with one scale a tensor.

    ``G = e + dW``; ``H = G + dW``. In each bin of L_T elements the entries with ``|H_i| >= max|G|`` of the bin are sent
    as ``s * sign(G_i)``, where s is the mean over the bins of ``max|G|``; ``e = G - s * sign(G)`` where sent, G
    elsewhere. 8 bits an entry (6 of index in its bin, sign, end of bin) for L_T < 64, else 16 (14 of index); a bin that
    sends nothing takes a unit of its own, unless all after it are empty too.

    Departures: messages have room for ``entries_per_bin`` entries a bin on average (5, which are the paper's rates of
    40 for convolutions and 200 for matrices); when they do not suffice, whole bins wait, beginning at another bin in
    each step. The paper's two bits of value hold a ternary number; here one of them ends the bin.

    The method is claimed in the patent US 11,295,208.

    Source: Chen et al. 2018, "AdaComp: adaptive residual gradient compression for data-parallel distributed training",
    AAAI, arXiv 1712.02679.
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

    def max_counts(self, spec: BucketSpec) -> tuple[int, ...]:  # noqa: D102
        return tuple(min(t.n, self._units(t)) for t in spec.tensors)

    def tensor_bytes(self, tensor: Tensor, spec: BucketSpec) -> int:  # noqa: D102
        return _HEAD + self._units(tensor) * (1 if self._bin(tensor) < _SHORT else 2)

    def encode_tensor(  # noqa: D102
        self, x: np.ndarray, out: np.ndarray, tensor: Tensor, spec: BucketSpec, info: StepInfo
    ) -> int:
        assert info.increment is not None
        length, bins = self._bin(tensor), self._bins(tensor)
        g = np.zeros(bins * length, x.dtype)
        g[: tensor.n] = x
        h = g.copy()
        with np.errstate(over="ignore"):
            h[: tensor.n] += info.increment[tensor.slice]
        g, h = g.reshape(bins, length), h.reshape(bins, length)
        largest = np.abs(g).max(1)
        # An empty bin reaches its largest entry everywhere, and a zero has no sign to send.
        send = (np.abs(h) >= largest[:, None]) & (g != 0)
        first = (info.step + info.rank) * _STRIDE % bins
        fitting = _fit(send.sum(1), self._units(tensor) - bins, first)
        send &= fitting[:, None]
        scale = as_scale(float(largest.mean(dtype=np.float64)))
        rows, columns = np.nonzero(send)
        units = self._write(rows, columns, g[rows, columns] > 0, length)
        put(out, 0, np.array([scale], "<f4"))
        put(out, 4, np.array([units.size], "<u4"))
        put(out, _HEAD, units)
        return rows.size

    def decode_tensor(self, data: np.ndarray, tensor: Tensor, spec: BucketSpec) -> tuple[np.ndarray, np.ndarray]:  # noqa: D102
        length = self._bin(tensor)
        dtype, bits = _unit(length)
        scale = take_scales(data, 0, 1)[0]
        units = take(data, _HEAD, int(take(data, 4, 1, "<u4")[0]), dtype).astype(np.int64)
        empty = (1 << bits) - 1
        index, positive, last = units & empty, units >> bits & 1, units >> bits + 1
        bin_of = np.cumsum(last) - last
        marker = index == empty
        alone = np.ones(units.size, bool)
        alone[1:] = last[:-1] == 1
        if (marker & ((last == 0) | ~alone)).any() or (~marker & (index >= length)).any():
            raise WireError(f"entries of {tensor.name!r} are none that a sender writes; the message is damaged")
        sent = ~marker
        positions = (bin_of * length + index)[sent]
        return positions, np.where(positive[sent] == 1, scale, -scale)

    def _bin(self, tensor: Tensor) -> int:
        return self.options.conv_bin if len(tensor.shape) > 2 else self.options.fc_bin

    def _bins(self, tensor: Tensor) -> int:
        return -(-tensor.n // self._bin(tensor))

    def _units(self, tensor: Tensor) -> int:
        """Room for entries and empty bins; a single bin can always send all it has."""
        bins = self._bins(tensor)
        return max(math.ceil(self.options.entries_per_bin * bins), bins + min(self._bin(tensor), tensor.n))

    @staticmethod
    def _write(rows: np.ndarray, columns: np.ndarray, positive: np.ndarray, length: int) -> np.ndarray:
        """Entries, sorted by bin, and empty bins before the last entry, as units."""
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
    """Type of a unit and bits of its index, whose largest value marks an empty bin."""
    return ("u1", 6) if length < _SHORT else ("<u2", 14)


def _fit(counts: np.ndarray, capacity: int, first: int) -> np.ndarray:
    """Which bins may send, (bins,) bool, with ``capacity`` entries left beyond one a bin; ``first`` is asked first."""
    extra = np.roll(np.maximum(counts - 1, 0), -first)
    return np.roll((np.cumsum(extra) <= capacity) | (extra == 0), first)
