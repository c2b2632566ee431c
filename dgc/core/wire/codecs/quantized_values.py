"""Value codecs of a few bits an entry and a scale for each group of a message.

k = entries, a group = the entries of one tensor. Groups keep layers of different magnitude apart; they cost nothing
to mark, since the boundaries follow from the positions and the layout, which a receiver has.
"""

from __future__ import annotations

import numpy as np

from dgc.core.wire.codecs.base import ValueCodecId
from dgc.core.wire.codecs.blocks import block_to_read, block_to_write, padded, words_for
from dgc.core.wire.codecs.float_values import check_values
from dgc.errors import WireError


class Int8Values:
    """8 bits an entry: q in -127..127, a value is (q / 127) * largest magnitude of its group.

    The error is at most 1/254 of the group's largest magnitude, and that largest value comes back exact. The factor
    q / 127 comes first and is at most 1, so nothing overflows, and nothing is divided by a scale that fell to 0.

    A block: (groups,) float32 largest magnitudes, padded; then (k,) int8, padded.
    """

    id = ValueCodecId.INT8
    name = "int8"
    dtype = np.dtype(np.float32)
    grouped = True

    _LEVELS = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32) / np.float32(127)
    """Factor for each byte read as unsigned."""

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return padded(4 * groups) + padded(k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        check_values(values, self.dtype, self.name)
        sizes = _group_sizes(bounds, values.size, self.name)
        k, groups = values.size, sizes.size
        block = block_to_write(out, self.max_bytes(k, groups), self.name)
        quantized, largest = self._quantize(values, bounds, sizes)
        table = padded(4 * groups)
        block[: 4 * groups].view("<f4")[...] = largest
        block[4 * groups : table] = 0
        block[table : table + k].view(np.int8)[...] = quantized
        block[table + k :] = 0
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        sizes = _group_sizes(bounds, count, self.name)
        block = block_to_read(data, self.max_bytes(count, sizes.size), self.name)
        table = padded(4 * sizes.size)
        largest = block[: 4 * sizes.size].view("<f4")
        quantized = block[table : table + count]
        if bool((quantized == 128).any()):
            raise WireError(f"{self.name}: an entry is -128, the codec writes -127..127. The message is damaged.")
        return self._restore(quantized, largest, sizes), block.size

    def roundtrip(self, values: np.ndarray, bounds: np.ndarray) -> np.ndarray:  # noqa: D102
        check_values(values, self.dtype, self.name)
        sizes = _group_sizes(bounds, values.size, self.name)
        quantized, largest = self._quantize(values, bounds, sizes)
        return self._restore(quantized.view(np.uint8), largest, sizes)

    @staticmethod
    def _quantize(values: np.ndarray, bounds: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        filled = sizes > 0
        largest = np.zeros(sizes.size, np.float32)
        if values.size:
            largest[filled] = np.maximum.reduceat(np.abs(values), bounds[:-1][filled])
        divisor = np.where(largest > np.float32(0), largest, np.float32(1))
        with np.errstate(under="ignore", invalid="ignore"):
            ratios = values / np.repeat(divisor, sizes)
        if not np.isfinite(largest).all():
            # The group reads back as NaN or 0 * infinity = NaN whatever q is, but a cast of NaN to int8 is undefined.
            ratios[~np.isfinite(ratios)] = 0
        ratios *= np.float32(127)
        return np.rint(ratios, out=ratios).astype(np.int8), largest

    def _restore(self, quantized: np.ndarray, largest: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        values: np.ndarray = self._LEVELS[quantized]
        with np.errstate(under="ignore", invalid="ignore"):
            values *= np.repeat(largest, sizes)
        return values


class Int2Values:
    """2 bits an entry: its sign, and which of its group's two magnitudes it gets.

    The magnitudes are the mean of those above the group's mean magnitude, and the mean of the others; so the sum of a
    group's magnitudes is kept exactly (in real numbers), and a single large entry stays as it is.

    A block: (groups, 2) float32 smaller and larger magnitude, 0 without members; then two bits an entry, lowest bits
    first, 1 = negative and 2 = larger magnitude, padded.
    """

    id = ValueCodecId.INT2
    name = "int2"
    dtype = np.dtype(np.float32)
    grouped = True

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return 8 * groups + 8 * words_for(2 * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        check_values(values, self.dtype, self.name)
        sizes = _group_sizes(bounds, values.size, self.name)
        block = block_to_write(out, self.max_bytes(values.size, sizes.size), self.name)
        table = 8 * sizes.size
        codes, magnitudes = self._quantize(values, bounds, sizes)
        block[:table].view("<f4")[...] = magnitudes.reshape(-1)
        bits = np.packbits(codes, bitorder="little")
        block[table : table + bits.size] = bits
        block[table + bits.size :] = 0
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        sizes = _group_sizes(bounds, count, self.name)
        block = block_to_read(data, self.max_bytes(count, sizes.size), self.name)
        table = 8 * sizes.size
        magnitudes = block[:table].view("<f4").reshape(-1, 2)
        codes = np.unpackbits(block[table:], count=2 * count, bitorder="little").reshape(-1, 2)
        return self._restore(codes, magnitudes, sizes), block.size

    def roundtrip(self, values: np.ndarray, bounds: np.ndarray) -> np.ndarray:  # noqa: D102
        check_values(values, self.dtype, self.name)
        sizes = _group_sizes(bounds, values.size, self.name)
        return self._restore(*self._quantize(values, bounds, sizes), sizes)

    @staticmethod
    def _quantize(values: np.ndarray, bounds: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (k, 2) uint8, whether an entry is negative and is large, and (groups, 2) float32 magnitudes."""
        codes = np.empty((values.size, 2), np.uint8)
        magnitudes = np.zeros((sizes.size, 2), np.float32)
        if values.size:
            filled = sizes > 0
            starts, members = bounds[:-1][filled], sizes[filled]
            size = np.abs(values)
            # In float64: the sum of a group may exceed float32, and a mean of finite values then never does.
            total = np.add.reduceat(size, starts, dtype=np.float64)
            large = size > np.repeat((total / members).astype(np.float32), members)
            above = np.add.reduceat(np.where(large, size, np.float32(0)), starts, dtype=np.float64)
            below = np.add.reduceat(np.where(large, np.float32(0), size), starts, dtype=np.float64)
            count = np.add.reduceat(large, starts, dtype=np.int64)
            magnitudes[filled, 0] = below / np.maximum(members - count, np.int64(1))
            magnitudes[filled, 1] = above / np.maximum(count, np.int64(1))
            codes[:, 0] = values < 0
            codes[:, 1] = large
        return codes, magnitudes

    @staticmethod
    def _restore(codes: np.ndarray, magnitudes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        # By arithmetic on the bits, as in the codec sign.
        bits = magnitudes.view(np.uint32)
        chosen = np.repeat(bits[:, 0], sizes)
        chosen ^= np.repeat(bits[:, 0] ^ bits[:, 1], sizes) * codes[:, 1]
        chosen ^= codes[:, 0].astype(np.uint32) << np.uint32(31)
        return chosen.view(np.float32)


class SignValues:
    """1 bit an entry: each value becomes the mean of its group's values of the same sign.

    What a class of values loses, the residual keeps, and the sum over each class is kept exactly (in real numbers).
    Zeros count as positive. A class without members has the mean 0.

    A block: (groups, 2) float32 means of the non-negative and of the negative values; then one bit an entry, lowest
    bit first, 1 = negative, padded.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Dryden et al. 2016, two means of sent entries.
    """

    id = ValueCodecId.SIGN
    name = "sign"
    dtype = np.dtype(np.float32)
    grouped = True

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return 8 * groups + 8 * words_for(k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        check_values(values, self.dtype, self.name)
        sizes = _group_sizes(bounds, values.size, self.name)
        block = block_to_write(out, self.max_bytes(values.size, sizes.size), self.name)
        negative, means = self._split(values, bounds, sizes)
        table = 8 * sizes.size
        block[:table].view("<f4")[...] = means.reshape(-1)
        bits = np.packbits(negative, bitorder="little")
        block[table : table + bits.size] = bits
        block[table + bits.size :] = 0
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        sizes = _group_sizes(bounds, count, self.name)
        block = block_to_read(data, self.max_bytes(count, sizes.size), self.name)
        table = 8 * sizes.size
        means = block[:table].view("<f4").reshape(-1, 2)
        negative = np.unpackbits(block[table:], count=count, bitorder="little").view(np.bool_)
        return self._restore(negative, means, sizes), block.size

    def roundtrip(self, values: np.ndarray, bounds: np.ndarray) -> np.ndarray:  # noqa: D102
        check_values(values, self.dtype, self.name)
        sizes = _group_sizes(bounds, values.size, self.name)
        negative, means = self._split(values, bounds, sizes)
        return self._restore(negative, means, sizes)

    @staticmethod
    def _split(values: np.ndarray, bounds: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        negative = values < 0
        means = np.zeros((sizes.size, 2), np.float32)
        if values.size:
            filled = sizes > 0
            starts = bounds[:-1][filled]
            # In float64: the sum of a group may exceed float32, and a mean of finite values then never does.
            zero = np.float32(0)
            below = np.add.reduceat(np.minimum(values, zero), starts, dtype=np.float64)
            above = np.add.reduceat(np.maximum(values, zero), starts, dtype=np.float64)
            members = np.add.reduceat(negative, starts, dtype=np.int64)
            means[filled, 0] = above / np.maximum(sizes[filled] - members, np.int64(1))
            means[filled, 1] = below / np.maximum(members, np.int64(1))
        return negative, means

    @staticmethod
    def _restore(negative: np.ndarray, means: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        # np.where on random signs is six times slower than choosing by arithmetic on the bits.
        bits = means.view(np.uint32)
        chosen = np.repeat(bits[:, 0], sizes)
        chosen ^= np.repeat(bits[:, 0] ^ bits[:, 1], sizes) * negative
        return chosen.view(np.float32)


def _group_sizes(bounds: np.ndarray, k: int, name: str) -> np.ndarray:
    """Return (groups,) sizes of the groups.

    Raises:
        WireError: bounds do not run from 0 to k without a step back.
    """
    sizes = np.diff(bounds)
    if bounds.size < 1 or bounds[0] != 0 or bounds[-1] != k or (sizes.size and int(sizes.min()) < 0):
        raise WireError(
            f"{name}: the bounds of the groups must run from 0 to {k} entries without a step back. They follow from "
            "the layout's segments, np.searchsorted(positions, segment_offsets)."
        )
    return sizes
