"""The bit loops in Numba. Imported on first use only, since Numba takes long to load.

All word arithmetic is in uint64: Numba turns a mix of int64 and uint64 into float64.
"""

from __future__ import annotations

from numba import types, uint64
from numba.extending import intrinsic

from dgc.core.kernels.jit import entry


@intrinsic
def _trailing_zeros(typing_context, word):
    """Number of zero bits below the lowest one of a uint64 that is not 0: one machine instruction."""

    def generate(context, builder, signature, arguments):
        zero_is_undefined = context.get_constant(types.boolean, True)
        return builder.cttz(arguments[0], zero_is_undefined)

    return types.uint64(types.uint64), generate


@entry(__file__)
def elias_fano_encode(positions, n, width, low, high):
    """See :class:`~dgc.core.wire.bits.BitKernels`."""
    high[:] = 0
    mask = (uint64(1) << uint64(width)) - uint64(1)
    pending = uint64(0)  # low bits that do not fill a word yet
    filled = 0
    word = 0
    previous = -1
    for i in range(positions.size):
        position = positions[i]
        if position <= previous or position >= n:
            return i
        previous = position
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
    return positions.size


@entry(__file__)
def elias_fano_decode(low, high, n, width, positions):
    """See :class:`~dgc.core.wire.bits.BitKernels`."""
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
def bitmap_encode(positions, n, words):
    """See :class:`~dgc.core.wire.bits.BitKernels`."""
    words[:] = 0
    previous = -1
    for i in range(positions.size):
        position = positions[i]
        if position <= previous or position >= n:
            return i
        previous = position
        words[position >> 6] |= uint64(1) << uint64(position & 63)
    return positions.size


@entry(__file__)
def bitmap_decode(words, n, positions):
    """See :class:`~dgc.core.wire.bits.BitKernels`."""
    count = positions.size
    i = 0
    for word in range(words.size):
        ones = words[word]
        while ones != uint64(0):
            position = (word << 6) + int(_trailing_zeros(ones))  # pyright: ignore[reportCallIssue]
            ones &= ones - uint64(1)
            if i == count:  # before the range, or a stray bit behind the last entry would pass
                return count + 1
            if position >= n:
                return i
            positions[i] = position
            i += 1
    return i
