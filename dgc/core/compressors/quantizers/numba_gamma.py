"""Elias gamma codes in Numba, see :class:`dgc.core.compressors.quantizers.loops.Loops`. They call nothing outside."""

from __future__ import annotations

from numba import uint64

from dgc.core.kernels.compile import entry, helper


@helper
def _put(words, at, value, length):
    """Write the low ``length`` bits of a value, lowest first, from bit ``at`` on."""
    for j in range(length):
        if (value >> uint64(j)) & uint64(1):
            words[(at + j) >> 6] |= uint64(1) << uint64((at + j) & 63)
    return at + length


@helper
def _put_gamma(words, at, value):
    length = 0
    while (value >> length) > 1:
        length += 1
    at += length  # so many zeros
    words[at >> 6] |= uint64(1) << uint64(at & 63)
    return _put(words, at + 1, uint64(value), length)


@entry(__file__)
def gamma_encode(codes, levels, words):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    words[:] = 0
    at = 0
    last = -1
    entries = 0
    for i in range(codes.size):
        level = int(codes[i]) - levels
        if level == 0:
            continue
        at = _put_gamma(words, at, i - last)
        at = _put(words, at, uint64(1 if level < 0 else 0), 1)
        at = _put_gamma(words, at, abs(level))
        last = i
        entries += 1
    return entries, at


@helper
def _bit(words, at):
    return (words[at >> 6] >> uint64(at & 63)) & uint64(1)


@helper
def _take_gamma(words, at, end):
    """Value and the bit after it; value 0 when the code does not end before ``end`` or is beyond 2**31."""
    length = 0
    while at < end and _bit(words, at) == uint64(0):
        length += 1
        at += 1
    at += 1
    if length > 30 or at + length > end:
        return 0, at
    value = 0
    for j in range(length):
        value |= int(_bit(words, at + j)) << j
    return value | (1 << length), at + length


@entry(__file__)
def gamma_decode(words, bits, entries, levels, codes):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    codes[:] = levels
    at = 0
    last = -1
    for _ in range(entries):
        gap, at = _take_gamma(words, at, bits)
        if gap == 0 or last + gap >= codes.size or at >= bits:
            return False
        last += gap
        negative = _bit(words, at)
        level, at = _take_gamma(words, at + 1, bits)
        if level == 0 or level > levels:
            return False
        codes[last] = levels - level if negative else levels + level
    return at == bits
