"""Value codecs that keep a floating-point number per entry. k = entries."""

from __future__ import annotations

import math

import numpy as np

from dgc.core.wire.codecs.base import ValueCodecId
from dgc.core.wire.codecs.blocks import block_of, padded
from dgc.errors import WireError


def check_values(values: np.ndarray, dtype: np.dtype, name: str) -> None:
    """Refuse values of another type: a silent cast of float64 could overflow.

    Raises:
        WireError: not one-dimensional, or not of this type.
    """
    if values.dtype != dtype or values.ndim != 1:
        raise WireError(
            f"{name}: values are {values.dtype} of shape {values.shape}, this codec takes one-dimensional {dtype}."
        )


class _PlainValues:
    """Values as they are."""

    id: ValueCodecId
    name: str
    dtype: np.dtype
    grouped = False

    def max_bytes(self, k: int, groups: int) -> int:
        return padded(self.dtype.itemsize * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        check_values(values, self.dtype, self.name)
        return _write(values, self.dtype, out, self.name)

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        numbers, consumed = _read(data, count, self.dtype, self.name)
        return numbers.astype(self.dtype), consumed


class Float32Values(_PlainValues):
    """32 bits an entry, exact."""

    id = ValueCodecId.FLOAT32
    name = "float32"
    dtype = np.dtype(np.float32)


class Float64Values(_PlainValues):
    """64 bits an entry, exact: for models whose state is float64."""

    id = ValueCodecId.FLOAT64
    name = "float64"
    dtype = np.dtype(np.float64)


class Float16Values:
    """16 bits an entry: half precision, under one power of two for the whole message.

    Gradients are often below 6e-5, where half precision thins out. So the message's values are multiplied by the
    power of two that brings the largest to [2^14, 2^15): the relative error is at most 2^-11 for every value down to
    2^-28 of the largest one, and below that the absolute error is at most 2^-39 of the largest. Scaling by a power
    of two rounds nothing.

    A block: the exponent e as int32, 4 zero bytes, then k halves h; a value is h * 2^e.
    """

    id = ValueCodecId.FLOAT16
    name = "float16"
    dtype = np.dtype(np.float32)
    grouped = False

    HEAD = 8
    MIN_EXPONENT = -163
    """Brings the smallest float32, 2^-149, to 2^14."""
    MAX_EXPONENT = 113
    """Brings the largest float32, just below 2^128, to just below 2^15."""

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return self.HEAD + padded(2 * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        from dgc.core.wire.codecs import numba_loops as loops

        check_values(values, self.dtype, self.name)
        block = block_of(out, self.max_bytes(values.size, 0), self.name, writes=True)
        if values.flags.c_contiguous:
            largest = int(loops.largest_magnitude(values))
            exponent = (largest >> 23) - 141  # for a normal number, what frexp(largest) - 15 is
            if _SMALLEST_NORMAL <= largest and abs(exponent) <= 112:
                end = self.HEAD + 2 * values.size
                loops.to_halves(values, np.float32(2.0**-exponent), block[self.HEAD : end].view(np.uint16))
                block[:4].view(np.int32)[0] = exponent
                block[4:8] = 0
                block[end:] = 0
                return block.size
        halves, exponent = self._scale_down(values)
        block[:4].view("<i4")[...] = exponent
        block[4:8] = 0
        _write(halves, np.dtype("<f2"), block[self.HEAD :], self.name)
        return block.size

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        from dgc.core.wire.codecs import numba_loops as loops

        block = block_of(data, self.max_bytes(count, 0), self.name)
        exponent = int(block[:4].view("<i4")[0])
        if not self.MIN_EXPONENT <= exponent <= self.MAX_EXPONENT:
            raise WireError(
                f"{self.name}: the scale's exponent is {exponent}, it must be in {self.MIN_EXPONENT}.."
                f"{self.MAX_EXPONENT}. The message is damaged."
            )
        if -126 <= exponent:
            values = np.empty(count, np.float32)
            bits = block[self.HEAD : self.HEAD + 2 * count].view(np.uint16)
            if loops.from_halves(bits, np.float32(2.0**exponent), values):
                return values, block.size
        halves, _ = _read(block[self.HEAD :], count, np.dtype("<f2"), self.name)
        return _times_power_of_two(halves.astype(np.float32), exponent), block.size

    def _scale_down(self, values: np.ndarray) -> tuple[np.ndarray, int]:
        largest = float(np.abs(values).max()) if values.size else 0.0
        if largest == 0.0:
            return values.astype(np.float16), 0
        if not math.isfinite(largest):
            # The finite entries keep what precision they can, NaN and infinity stay what they are.
            exponent = self.MAX_EXPONENT
        else:
            exponent = math.frexp(largest)[1] - 15
        scaled = _times_power_of_two(values.copy(), -exponent)
        if exponent == self.MAX_EXPONENT and math.isfinite(largest):
            # Rounding up to 2^15 would read back as 2^128: infinity.
            np.clip(scaled, -_LARGEST_HALF, _LARGEST_HALF, out=scaled)
        with np.errstate(under="ignore"):
            return scaled.astype(np.float16), exponent


class Bfloat16Values:
    """16 bits an entry: the upper half of a float32, rounded to nearest, ties to even.

    Relative error at most 2^-8 over the whole range of normal float32, no scale needed. A finite value that would
    round to infinity becomes the largest finite bfloat16.
    """

    id = ValueCodecId.BFLOAT16
    name = "bfloat16"
    dtype = np.dtype(np.float32)
    grouped = False

    def max_bytes(self, k: int, groups: int) -> int:  # noqa: D102
        return padded(2 * k)

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:  # noqa: D102
        check_values(values, self.dtype, self.name)
        return _write(_upper_halves(values), np.dtype("<u2"), out, self.name)

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:  # noqa: D102
        halves, consumed = _read(data, count, np.dtype("<u2"), self.name)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32), consumed


_SMALLEST_NORMAL = 0x00800000  # 2^-126, the smallest normal float32
_LARGEST_HALF = np.float32(32752)  # the half-precision number just below 2^15
_INFINITY = np.uint32(0x7F800000)
_ROUNDS_TO_INFINITY = np.uint32(0x7F7F8000)


def _upper_halves(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bits of (k,) float32 as (k,) uint32."""
    bits = values.view(np.uint32)
    # Just below half a unit of the last bit kept, plus that bit itself: a tie goes up only from an odd one.
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if bits.size and magnitude.max() >= _ROUNDS_TO_INFINITY:
        truncated = bits >> np.uint32(16)
        # A NaN whose payload is all in the lower half would truncate to infinity: make it quiet, which sets a bit.
        truncated[magnitude > _INFINITY] |= np.uint32(0x40)
        rounded = np.where(magnitude >= _ROUNDS_TO_INFINITY, truncated, rounded)
    return rounded


def _times_power_of_two(values: np.ndarray, exponent: int) -> np.ndarray:
    """Multiply (k,) float32 by 2^exponent in place, -163 <= exponent <= 163, with at most one rounding."""
    # Small values may fall below float32's range on purpose, and NaN may come in: neither is worth a warning.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if -126 <= exponent <= 127:
            values *= np.float32(math.ldexp(1.0, exponent))
        else:
            # 2^exponent is no normal float32. The first factor keeps everything normal, so only the second rounds.
            first = math.copysign(100, exponent)
            values *= np.float32(2.0**first)
            values *= np.float32(2.0 ** (exponent - first))
    return values


def _write(numbers: np.ndarray, dtype: np.dtype, out: np.ndarray, name: str) -> int:
    used = dtype.itemsize * numbers.size
    block = block_of(out, padded(used), name, writes=True)
    block[:used].view(dtype)[...] = numbers
    block[used:] = 0
    return block.size


def _read(data: np.ndarray, count: int, dtype: np.dtype, name: str) -> tuple[np.ndarray, int]:
    used = dtype.itemsize * count
    block = block_of(data, padded(used), name)
    return block[:used].view(dtype), block.size
