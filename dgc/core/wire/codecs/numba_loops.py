"""The loops of the codecs, compiled by Numba; import this on first use, since Numba takes seconds to load.

All word arithmetic is in uint64: Numba turns a mix of int64 and uint64 into float64.
"""

from __future__ import annotations

import numpy as np
from numba import types, uint32, uint64
from numba.extending import intrinsic

from dgc.core.kernels.compile import entry, helper

_SMALLEST_NORMAL = np.uint32(0x38800000)
"""2^-14 as float32 bits: below it half precision is subnormal."""

_ROUNDER = np.float32(12582912)
"""1.5 * 2^23: a float32 below 2^22 loses its fraction when this is added and taken away again."""


@intrinsic
def _bits(typing_context, x):
    """The bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def _float(typing_context, x):
    """The float32 of these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@helper
def _half_of(bits):
    """The bits in half precision of the float32 with these bits, rounded to nearest, ties to even."""
    magnitude = bits & uint32(0x7FFFFFFF)
    # Added to 0.5, a subnormal half ends in float32's lowest bits, rounded by the addition itself.
    small = _bits(_float(magnitude) + np.float32(0.5)) - uint32(0x3F000000)
    odd = (magnitude >> uint32(13)) & uint32(1)
    large = (magnitude - uint32(0x38000000) + uint32(0xFFF) + odd) >> uint32(13)
    half = small if magnitude < uint32(_SMALLEST_NORMAL) else large
    return half | ((bits >> uint32(16)) & uint32(0x8000))


@helper
def _value_of(half):
    """The float32 that a finite half is, of its bits."""
    magnitude = (half & uint32(0x7FFF)) << uint32(13)
    normal = _float(magnitude + uint32(0x38000000))
    subnormal = _float(magnitude + uint32(0x38800000)) - np.float32(6.103515625e-05)
    x = subnormal if magnitude < uint32(0x800000) else normal
    return _float(_bits(x) | ((half & uint32(0x8000)) << uint32(16)))


@entry(__file__)
def largest_magnitude(values: np.ndarray) -> int:
    """The largest magnitude's bits among (k,) float32; NaN is larger than infinity."""
    largest = uint32(0)
    for x in values:
        largest = max(largest, _bits(x) & uint32(0x7FFFFFFF))
    return largest


@entry(__file__)
def to_halves(values: np.ndarray, factor: np.float32, halves: np.ndarray) -> None:
    """``halves[i]`` = the bits of ``values[i] * factor`` in half precision, rounded to nearest, ties to even.

    Args:
        values: (k,) float32, finite.
        factor: float32, a power of two that leaves every magnitude below 65520.
        halves: (k,) uint16, filled.
    """
    for i in range(halves.size):
        halves[i] = _half_of(_bits(values[i] * factor))


@entry(__file__)
def from_halves(halves: np.ndarray, factor: np.float32, values: np.ndarray) -> bool:
    """``values[i]`` = ``halves[i] * factor`` with one rounding.

    Args:
        halves: (k,) uint16 bits of half precision numbers.
        factor: float32, a power of two.
        values: (k,) float32, filled.

    Returns:
        False when a half is infinite or NaN; the values are then to be made another way.
    """
    finite = True
    for i in range(halves.size):
        half = uint32(halves[i])
        finite &= (half & uint32(0x7FFF)) < uint32(0x7C00)
        values[i] = _value_of(half) * factor
    return finite


@entry(__file__)
def to_tiles(positions: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> None:
    """Split positions into tiles of 65 536.

    Args:
        positions: (k,) int64, ascending.
        counts: (tiles,) uint32, receives the number of positions in each tile.
        offsets: (k,) uint16, receives each position's place in its tile.
    """
    k = positions.size
    for i in range(k):
        offsets[i] = positions[i] & 0xFFFF
    first = 0
    for tile in range(counts.size):
        # The first position beyond the tile, by bisection: k is small beside the tiles, or many share one.
        low, high = first, k
        while low < high:
            middle = (low + high) // 2
            if positions[middle] >> 16 > tile:
                high = middle
            else:
                low = middle + 1
        counts[tile] = low - first
        first = low


@intrinsic
def _trailing_zeros(typing_context, word):
    """Number of zero bits below the lowest one of a uint64 that is not 0: one machine instruction."""

    def generate(context, builder, signature, arguments):
        zero_is_undefined = context.get_constant(types.boolean, True)
        return builder.cttz(arguments[0], zero_is_undefined)

    return types.uint64(types.uint64), generate


@helper
def _sound(positions, n):
    """How many positions stand before the first that is not above the one before it, or not below n."""
    k = positions.size
    wrong = 0
    for i in range(1, k):  # without a way out, several at once
        wrong += positions[i] <= positions[i - 1]
    if k == 0 or (wrong == 0 and positions[0] >= 0 and positions[k - 1] < n):
        return k
    i = 0
    while 0 <= positions[i] < n and (i == 0 or positions[i] > positions[i - 1]):
        i += 1
    return i


@entry(__file__)
def elias_fano_encode(positions: np.ndarray, n: int, width: int, low: np.ndarray, high: np.ndarray) -> int:
    """Write (k,) int64 positions below n into low and high, uint64 words that need no clearing.

    Returns:
        How many are strictly ascending below n, from the first on; the words are complete if that is k.
    """
    sound = _sound(positions, n)
    high[:] = 0
    mask = (uint64(1) << uint64(width)) - uint64(1)
    pending = uint64(0)  # low bits that do not fill a word yet
    filled = 0
    word = 0
    for i in range(sound):
        position = positions[i]
        bits = uint64(position) & mask
        pending |= bits << uint64(filled)
        filled += width
        if filled >= 64:
            low[word] = pending
            word += 1
            filled -= 64
            pending = bits >> uint64(width - filled)
        bit = (position >> width) + i
        high[bit >> 6] |= uint64(1) << uint64(bit & 63)
    if filled > 0:
        low[word] = pending
    return sound


@entry(__file__)
def elias_fano_decode(low: np.ndarray, high: np.ndarray, n: int, width: int, positions: np.ndarray) -> int:
    """Fill (k,) int64 positions.

    Returns:
        How many are strictly ascending below n, from the first on; k + 1 when the words hold more than k.
    """
    mask = (uint64(1) << uint64(width)) - uint64(1)
    count = positions.size
    previous = -1
    i = 0
    for word in range(high.size):
        ones = high[word]
        while ones != uint64(0):
            if i == count:
                return count + 1
            bit = (word << 6) + int(_trailing_zeros(ones))  # pyright: ignore[reportCallIssue]
            ones &= ones - uint64(1)
            position = (bit - i) << width
            if width > 0:
                start = i * width
                at = start >> 6
                shift = start & 63
                bits = low[at] >> uint64(shift)
                if shift + width > 64:
                    bits |= low[at + 1] << uint64(64 - shift)
                position |= int(bits & mask)
            if position <= previous or position >= n:
                return i
            previous = position
            positions[i] = position
            i += 1
    return i


@entry(__file__)
def encode_integers(
    x: np.ndarray,
    starts: np.ndarray,
    bounds: np.ndarray,
    bits: int,
    scales: np.ndarray,
    codes: np.ndarray,
    left: np.ndarray,
) -> None:
    """Codes of ``int8`` and ``int3``, of groups that lie apart, and what they lose.

    Args:
        x: (N,) float32.
        starts: (groups,) int64, where each group begins in x.
        bounds: (groups + 1,) int64, their lengths' sums, k in all.
        bits: of a code.
        scales: (groups,) float32; filled.
        codes: (k,) uint8; filled, two's complement in the lowest bits.
        left: (N,) float32; ``x - decoded`` of the groups.
    """
    levels, mask = np.float32((1 << (bits - 1)) - 1), (1 << bits) - 1
    for g in range(starts.size):
        n = bounds[g + 1] - bounds[g]
        given, lost, code = (
            x[starts[g] : starts[g] + n],
            left[starts[g] : starts[g] + n],
            codes[bounds[g] : bounds[g + 1]],
        )
        magnitude = uint32(0)
        for i in range(n):
            magnitude = max(magnitude, _bits(given[i]) & uint32(0x7FFFFFFF))
        largest = _float(magnitude)
        divisor = largest if largest > np.float32(0) else np.float32(1)
        for i in range(n):
            # Rounded to nearest, ties to even, by the addition itself: magnitudes are at most 127.
            q = (given[i] / divisor) * levels + _ROUNDER - _ROUNDER
            lost[i] = given[i] - (q / levels) * largest
            # A group that is not finite reads as NaN.
            code[i] = np.uint8((np.int32(q) if abs(q) <= levels else np.int32(0)) & mask)
        scales[g] = largest


@entry(__file__)
def add_integers(
    scales: np.ndarray, codes: np.ndarray, starts: np.ndarray, bounds: np.ndarray, bits: int, sums: np.ndarray
) -> bool:
    """Add what :func:`encode_integers` coded to (N,) float32 ``sums``; False if a code is one that it never makes."""
    negative = 1 << (bits - 1)
    levels = np.float32(negative - 1)
    damaged = False
    for i in range(codes.size):
        damaged |= codes[i] == negative
    if damaged:
        return False
    for g in range(starts.size):
        n = bounds[g + 1] - bounds[g]
        place, code, largest = sums[starts[g] : starts[g] + n], codes[bounds[g] : bounds[g + 1]], scales[g]
        for i in range(n):
            place[i] += (np.float32((np.int32(code[i]) ^ negative) - negative) / levels) * largest
    return True


@entry(__file__)
def encode_two_means(values: np.ndarray, bounds: np.ndarray, bits: int, means: np.ndarray, codes: np.ndarray) -> None:
    """Codes of ``sign`` (one bit an entry) and ``int2`` (two).

    Args:
        values: (k,) float32.
        bounds: (groups + 1,) int64.
        bits: a code's; the last one says which mean of its group an entry has.
        means: (2 groups,) float32; filled.
        codes: (k,) uint8; filled.
    """
    for g in range(bounds.size - 1):
        n = bounds[g + 1] - bounds[g]
        group, code = values[bounds[g] : bounds[g + 1]], codes[bounds[g] : bounds[g + 1]]
        # In float64: the sum of a group may exceed float32, and a mean of finite values then never does.
        total = 0.0
        if bits == 2:
            for i in range(n):
                total += abs(group[i])
        middle = np.float32(total / max(n, 1))
        first, second, members = 0.0, 0.0, 0
        for i in range(n):
            negative = group[i] < np.float32(0)
            value = abs(group[i]) if bits == 2 else group[i]
            is_second = value > middle if bits == 2 else negative
            code[i] = np.uint8(negative | is_second << (bits - 1))
            first += 0.0 if is_second else value
            second += value if is_second else 0.0
            members += is_second
        means[2 * g], means[2 * g + 1] = first / max(n - members, 1), second / max(members, 1)


@entry(__file__)
def decode_two_means(means: np.ndarray, codes: np.ndarray, bounds: np.ndarray, bits: int, values: np.ndarray) -> None:
    """Read what :func:`encode_two_means` coded into ``values``, (k,) float32."""
    for g in range(bounds.size - 1):
        first = _bits(means[2 * g])
        change = first ^ _bits(means[2 * g + 1])
        for i in range(bounds[g], bounds[g + 1]):
            code = uint32(codes[i])
            # Arithmetic on the bits, since a branch on random ones costs three times as much.
            value = first ^ (change * (code >> uint32(bits - 1) & uint32(1)))
            values[i] = _float(value | (code & uint32(bits - 1)) << uint32(31))
