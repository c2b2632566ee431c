"""Codes as strings of bits, trits and Elias gamma codes, compiled by Numba; nothing outside this file is called."""

from __future__ import annotations

import numpy as np
from numba import uint8, uint64

from dgc.core.kernels.compile import entry, helper

_TRITS = (np.arange(243)[:, None] // 3 ** np.arange(5) % 3).astype(np.uint8)


@helper
def _pack_few(codes, bits, out, start):
    """From byte ``start`` on, for any number of bits."""
    pending = uint64(0)
    filled = 0
    at = start
    for i in range(start * 8 // bits, codes.size):
        pending |= uint64(codes[i]) << uint64(filled)
        filled += bits
        while filled >= 8:
            out[at] = uint8(pending & uint64(255))
            at += 1
            pending >>= uint64(8)
            filled -= 8
    if filled > 0:
        out[at] = uint8(pending & uint64(255))


@helper
def _pack_bytes(codes, bits, out):
    """All whole bytes; returns how many. Fast where ``bits``, a divisor of 8, is a constant."""
    each = 8 // bits
    whole = codes.size // each
    for b in range(whole):
        byte = uint8(0)
        for j in range(each):
            byte |= codes[each * b + j] << bits * j
        out[b] = byte
    return whole


@entry(__file__)
def pack(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Write the low ``bits`` bits (1 to 8) of each code as one string, lowest first, into ceil(n*bits/8) bytes."""
    if bits == 1:
        done = _pack_bytes(codes, 1, out)
    elif bits == 2:
        done = _pack_bytes(codes, 2, out)
    elif bits == 4:
        done = _pack_bytes(codes, 4, out)
    elif bits == 8:
        done = _pack_bytes(codes, 8, out)
    else:
        done = 0
    _pack_few(codes, bits, out, done)


@helper
def _unpack_few(data, bits, codes, start):
    """From byte ``start`` on, for any number of bits."""
    pending = uint64(0)
    filled = 0
    at = start
    mask = (uint64(1) << uint64(bits)) - uint64(1)
    for i in range(start * 8 // bits, codes.size):
        while filled < bits:
            pending |= uint64(data[at]) << uint64(filled)
            at += 1
            filled += 8
        codes[i] = uint8(pending & mask)
        pending >>= uint64(bits)
        filled -= bits


@helper
def _unpack_bytes(data, bits, codes):
    """The codes of all whole bytes; returns how many bytes. Fast as :func:`_pack_bytes`."""
    each = 8 // bits
    whole = codes.size // each
    for b in range(whole):
        for j in range(each):
            codes[each * b + j] = data[b] >> bits * j & (1 << bits) - 1
    return whole


@entry(__file__)
def unpack(data: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """Undo :func:`pack`."""
    if bits == 1:
        done = _unpack_bytes(data, 1, codes)
    elif bits == 2:
        done = _unpack_bytes(data, 2, codes)
    elif bits == 4:
        done = _unpack_bytes(data, 4, codes)
    elif bits == 8:
        done = _unpack_bytes(data, 8, codes)
    else:
        done = 0
    _unpack_few(data, bits, codes, done)


@entry(__file__)
def pack_trits(codes: np.ndarray, out: np.ndarray) -> None:
    """Write codes of 0, 1 and 2, five to a byte as a number to the base 3, into ceil(n/5) bytes."""
    whole = codes.size // 5
    for b in range(whole):
        i = 5 * b
        out[b] = codes[i] + 3 * codes[i + 1] + 9 * codes[i + 2] + 27 * codes[i + 3] + 81 * codes[i + 4]
    rest = codes.size - 5 * whole
    if rest > 0:
        value = 0
        for j in range(rest - 1, -1, -1):
            value = 3 * value + codes[5 * whole + j]
        out[whole] = value


@entry(__file__)
def unpack_trits(data: np.ndarray, codes: np.ndarray) -> bool:
    """Undo :func:`pack_trits`; returns False where a byte is above 242, which none can be."""
    whole = codes.size // 5
    for b in range(whole):
        value = data[b]
        if value > 242:
            return False
        for j in range(5):
            codes[5 * b + j] = _TRITS[value, j]
    if 5 * whole < codes.size:
        if data[whole] > 242:
            return False
        for j in range(codes.size - 5 * whole):
            codes[5 * whole + j] = _TRITS[data[whole], j]
    return True


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
def gamma_encode(codes: np.ndarray, levels: int, words: np.ndarray) -> tuple[int, int]:
    """Write codes of :func:`round_signed` that are not ``levels`` as Elias gamma codes.

    Each is gamma(distance from the last), one bit for the sign, gamma(magnitude). gamma(v) is as many zeros as v
    has bits after its first, a one, and those bits, the lowest first.

    Args:
        codes: (n,) uint8.
        levels: the code that stands for 0.
        words: (w,) uint64 that suffice.

    Returns:
        Entries, and bits written.
    """
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
def gamma_decode(words: np.ndarray, bits: int, entries: int, levels: int, codes: np.ndarray) -> bool:
    """Undo :func:`gamma_encode`; returns False where the bits are none that it writes."""
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
