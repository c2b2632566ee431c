"""The loops of the quantising compressors in Numba, see :class:`dgc.core.compressors.quantizers.loops.Loops`.

They call nothing outside this file: it alone decides when compiled code is out of date. All hashing is in uint64, since
Numba turns a mix of int64 and uint64 into float64.
"""

from __future__ import annotations

import numpy as np
from numba import uint8, uint64

from dgc.core.kernels.compile import entry, helper

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-32
_LARGEST = np.finfo(np.float32).max
_TRITS = (np.arange(243)[:, None] // 3 ** np.arange(5) % 3).astype(np.uint8)


@helper
def _uniform(key, i):
    """Random number i of a key, in [0, 1) with 32 bits: SplitMix64 (Steele et al. 2014), which can start anywhere."""
    z = key + (uint64(i) + uint64(1)) * _GOLDEN
    z = (z ^ (z >> uint64(30))) * _MIX1
    z = (z ^ (z >> uint64(27))) * _MIX2
    z = z ^ (z >> uint64(31))
    return float(z >> uint64(32)) * _TO_UNIT


@entry(__file__)
def uniform(key, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    for i in range(out.size):
        out[i] = _uniform(key, i)


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
def pack(codes, bits, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
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
def unpack(data, bits, codes):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
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
def pack_trits(codes, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
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
def unpack_trits(data, codes):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
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


@entry(__file__)
def norms(x, group, squared, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    for g in range(out.size):
        largest = 0.0
        total = 0.0
        for i in range(g * group, min((g + 1) * group, x.size)):
            magnitude = abs(np.float64(x[i]))
            largest = max(largest, magnitude)
            total += magnitude * magnitude
        out[g] = max(largest, np.sqrt(total)) if squared else largest


@entry(__file__)
def spread(x):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    largest = 0.0
    total = 0.0
    for i in range(x.size):
        value = np.float64(x[i])
        largest = max(largest, abs(value))
        total += value
    mean = total / x.size
    squares = 0.0
    for i in range(x.size):
        difference = np.float64(x[i]) - mean
        squares += difference * difference
    return largest, np.sqrt(squares / x.size)


@entry(__file__)
def round_signed(x, scales, group, limit, levels, key, codes):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    for g in range(scales.size):
        scale = float(scales[g])
        start = g * group
        stop = min(start + group, x.size)
        if scale == 0.0:
            for i in range(start, stop):
                codes[i] = levels
            continue
        factor = levels / scale
        for i in range(start, stop):
            value = float(x[i])
            magnitude = min(abs(value), limit)
            # Cut before it becomes an integer, which has no room for all of float64.
            level = int(min(float(levels), magnitude * factor + _uniform(key, i)))
            codes[i] = levels - level if value < 0 else levels + level


@entry(__file__)
def scale_signed(codes, scales, group, levels, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    most = 2 * levels
    good = True
    for g in range(scales.size):
        unit = scales[g] / np.float32(levels)
        for i in range(g * group, min((g + 1) * group, codes.size)):
            good &= codes[i] <= most
            # 127 * float32(largest / 127) may round to infinity.
            out[i] = min(max(np.float32(int(codes[i]) - levels) * unit, -_LARGEST), _LARGEST)
    return good


@entry(__file__)
def scale_span(codes, scale, levels, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    unit = scale / np.float32(levels)
    for i in range(codes.size):
        out[i] = np.float32(2 * int(codes[i]) - levels) * unit


@entry(__file__)
def round_span(x, scale, levels, key, codes):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    if scale == 0.0:
        for i in range(x.size):
            codes[i] = 0
        return
    half = 0.5 / scale
    for i in range(x.size):
        place = (float(x[i]) * half + 0.5) * levels
        codes[i] = int(max(0.0, min(float(levels), np.floor(place + _uniform(key, i)))))


@entry(__file__)
def split_means(x, means, signs):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    outer, columns, inner = x.shape
    low, high, above = np.zeros(columns), np.zeros(columns), np.zeros(columns, np.int64)
    if inner == 1:
        for o in range(outer):
            for c in range(columns):
                value = x[o, c, 0]
                negative = value < 0
                signs[o * columns + c] = 0 if negative else 1
                low[c] += value if negative else 0.0
                high[c] += 0.0 if negative else value
                above[c] += 0 if negative else 1
    else:
        at = 0
        for o in range(outer):
            for c in range(columns):
                below_sum = 0.0
                above_sum = 0.0
                count = 0
                for i in range(inner):
                    value = x[o, c, i]
                    negative = value < 0
                    signs[at + i] = 0 if negative else 1
                    below_sum += value if negative else 0.0
                    above_sum += 0.0 if negative else value
                    count += 0 if negative else 1
                at += inner
                low[c] += below_sum
                high[c] += above_sum
                above[c] += count
    for c in range(columns):
        below = outer * inner - above[c]
        means[0, c] = low[c] / below if below else 0.0
        means[1, c] = high[c] / above[c] if above[c] else 0.0


@entry(__file__)
def spread_means(signs, means, out):
    """See :class:`~dgc.core.compressors.quantizers.loops.Loops`."""
    outer, columns, inner = out.shape
    if inner == 1:
        for o in range(outer):
            for c in range(columns):
                out[o, c, 0] = means[1, c] if signs[o * columns + c] else means[0, c]
        return
    at = 0
    for o in range(outer):
        for c in range(columns):
            low = means[0, c]
            high = means[1, c]
            for i in range(inner):
                out[o, c, i] = high if signs[at + i] else low
            at += inner


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
