"""The loops of codecs and quantizers, compiled by Numba; import them on first use, because Numba takes seconds to load.

Letters: n elements, k entries. *codes* are small numbers, (n,) uint8, one for each element, before they are packed. No
loop reads or writes outside of its arrays. Words are computed in uint64, because Numba turns a mix of int64 and uint64
into float64.
"""

from __future__ import annotations

import numpy as np
from numba import uint8, uint32, uint64

from dgc.core.kernels.compile import entry, helper
from dgc.core.kernels.simd import bits_in, float_of, from_half, lowest_bit

# 2^-14 as float32 bits; halves below it are subnormal.
_SMALLEST_NORMAL = np.uint32(0x38800000)

# 1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to an integer.
_ROUNDER = np.float32(12582912)


@helper
def _half_of(bits):
    """Convert the bits of a float32 to the bits of a half, rounded to nearest, ties to even."""
    magnitude = bits & uint32(0x7FFFFFFF)
    # The addition of 0.5 moves a subnormal half to the lowest bits of a float32, and rounds it.
    small = bits_in(float_of(magnitude) + np.float32(0.5)) - uint32(0x3F000000)
    odd = (magnitude >> uint32(13)) & uint32(1)
    large = (magnitude - uint32(0x38000000) + uint32(0xFFF) + odd) >> uint32(13)
    half = small if magnitude < uint32(_SMALLEST_NORMAL) else large
    if magnitude >= uint32(0x7F800000):  # infinity; NaN stays one
        half = uint32(0x7C00) | uint32(0x200 if magnitude > uint32(0x7F800000) else 0)
    return half | ((bits >> uint32(16)) & uint32(0x8000))


@entry
def largest_magnitude(values: np.ndarray) -> int:
    """Return the bits of the largest magnitude of (k,) float32; NaN is larger than infinity."""
    largest = uint32(0)
    for x in values:
        largest = max(largest, bits_in(x) & uint32(0x7FFFFFFF))
    return largest


@entry
def to_halves(
    values: np.ndarray, factor: np.float32, second: np.float32, limit: np.float32, halves: np.ndarray
) -> None:
    """Write ``values[i] * factor * second`` as the bits of a half, rounded to nearest, ties to even.

    Args:
        values: (k,) float32.
        factor: a power of two. If ``second`` is not 1, ``values * factor`` must not be subnormal, except 0.
        second: a power of two. The magnitude of each finite product must be below 65520.
        limit: larger magnitudes, including infinity, become this number.
        halves: (k,) uint16, filled.
    """
    for i in range(halves.size):
        x = values[i] * factor * second
        x = limit if x > limit else -limit if x < -limit else x
        halves[i] = _half_of(bits_in(x))


@entry
def from_halves(halves: np.ndarray, factor: np.float32, second: np.float32, values: np.ndarray) -> None:
    """Write ``halves[i] * factor * second`` to ``values[i]``; halves are (k,) uint16 bits."""
    for i in range(halves.size):
        values[i] = from_half(halves[i]) * factor * second


@entry
def to_tiles(positions: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> None:
    """Split positions into tiles of 65 536.

    Args:
        positions: (k,) int64, ascending.
        counts: (tiles,) uint32, filled with the number of positions in each tile.
        offsets: (k,) uint16, filled with each position's offset in its tile.
    """
    k = positions.size
    for i in range(k):
        offsets[i] = positions[i] & 0xFFFF
    first = 0
    for tile in range(counts.size):
        # Find the first position beyond the tile by bisection.
        low, high = first, k
        while low < high:
            middle = (low + high) // 2
            if positions[middle] >> 16 > tile:
                high = middle
            else:
                low = middle + 1
        counts[tile] = low - first
        first = low


@helper
def _sound(positions, n):
    """Return the length of the longest prefix that is strictly ascending within [0, n)."""
    k = positions.size
    wrong = 0
    for i in range(1, k):  # without a break, so that LLVM can vectorise the loop
        wrong += positions[i] <= positions[i - 1]
    if k == 0 or (wrong == 0 and positions[0] >= 0 and positions[k - 1] < n):
        return k
    i = 0
    while 0 <= positions[i] < n and (i == 0 or positions[i] > positions[i - 1]):
        i += 1
    return i


@entry
def elias_fano_encode(positions: np.ndarray, n: int, width: int, low: np.ndarray, high: np.ndarray) -> int:
    """Write (k,) int64 positions below n into ``low`` and ``high``, which are uint64 words.

    Returns:
        The length of the longest prefix that is strictly ascending below n. If it is k, the words are complete.
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


@entry
def elias_fano_decode(low: np.ndarray, high: np.ndarray, n: int, width: int, positions: np.ndarray) -> int:
    """Read ``positions``, (k,) int64, from the words ``low`` and ``high``.

    Returns:
        The length of the longest prefix that is strictly ascending below n; k + 1 if the words hold more than k.
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
            bit = (word << 6) + lowest_bit(ones)
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


@entry
def encode_integers(
    x: np.ndarray,
    starts: np.ndarray,
    bounds: np.ndarray,
    bits: int,
    scales: np.ndarray,
    codes: np.ndarray,
    left: np.ndarray,
) -> None:
    """Encode groups of x as ``int8`` or ``int3``, and compute the error.

    Args:
        x: (N,) float32.
        starts: (groups,) int64, where each group begins in x.
        bounds: (groups + 1,) int64, the running sums of the groups' lengths, from 0 to k.
        bits: the number of bits in a code.
        scales: (groups,) float32, filled.
        codes: (k,) uint8, filled: two's complement in the lowest bits.
        left: (N,) float32, filled with ``x - decoded`` of the groups.
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
            magnitude = max(magnitude, bits_in(given[i]) & uint32(0x7FFFFFFF))
        largest = float_of(magnitude)
        divisor = largest if largest > np.float32(0) else np.float32(1)
        for i in range(n):
            # The addition rounds to nearest, ties to even: magnitudes are at most 127.
            q = (given[i] / divisor) * levels + _ROUNDER - _ROUNDER
            lost[i] = given[i] - (q / levels) * largest
            # A group that holds a value that is not finite is decoded as NaN.
            code[i] = np.uint8((np.int32(q) if abs(q) <= levels else np.int32(0)) & mask)
        scales[g] = largest


@entry
def add_integers(
    scales: np.ndarray, codes: np.ndarray, starts: np.ndarray, bounds: np.ndarray, bits: int, sums: np.ndarray
) -> bool:
    """Decode codes of :func:`encode_integers` and add them to (N,) float32 ``sums``; return False for a wrong code."""
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


@entry
def encode_means(values: np.ndarray, bounds: np.ndarray, bits: int, means: np.ndarray, codes: np.ndarray) -> None:
    """Encode values as ``int2`` or ``int4``: a sign, in bit 0, and the number of one of the group's mean magnitudes.

    A group's magnitudes are split at their mean, and each part at its own mean, until there are 2^(bits - 1) parts.

    Args:
        values: (k,) float32.
        bounds: (groups + 1,) int64.
        bits: the number of bits in a code.
        means: (2^(bits - 1) groups,) float32, filled with the mean of each part, 0 if the part is empty.
        codes: (k,) uint8, filled.
    """
    parts = 1 << (bits - 1)
    totals, members = np.empty(parts), np.empty(parts, np.int64)
    for g in range(bounds.size - 1):
        group, code = values[bounds[g] : bounds[g + 1]], codes[bounds[g] : bounds[g + 1]]
        mean = means[g * parts : (g + 1) * parts]
        # In float64, because the sum of a group may exceed float32; a mean of finite values does not.
        total = 0.0
        for i in range(group.size):
            total += abs(group[i])
        middle = np.float32(total / max(group.size, 1))
        # The first split keeps its sums in registers, which takes half the time of the loop below.
        first, second, above = 0.0, 0.0, 0
        for i in range(group.size):
            value = abs(group[i])
            is_second = value > middle
            code[i] = np.uint8(is_second)
            first += 0.0 if is_second else value
            second += value if is_second else 0.0
            above += is_second
        mean[0], mean[1] = first / max(group.size - above, 1), second / max(above, 1)
        count = 2
        while count < parts:
            count *= 2
            totals[:count] = 0.0
            members[:count] = 0
            for i in range(group.size):
                value = abs(group[i])
                part = code[i] << 1 | (value > mean[code[i]])
                code[i] = np.uint8(part)
                totals[part] += value
                members[part] += 1
            for part in range(count):
                mean[part] = totals[part] / max(members[part], 1)
        for i in range(group.size):
            code[i] = np.uint8(code[i] << 1 | (group[i] < np.float32(0)))


@entry
def decode_means(means: np.ndarray, codes: np.ndarray, bounds: np.ndarray, bits: int, values: np.ndarray) -> None:
    """Decode :func:`encode_means` into ``values``, (k,) float32."""
    for g in range(bounds.size - 1):
        mean = means[g << (bits - 1) :]
        for i in range(bounds[g], bounds[g + 1]):
            code = uint32(codes[i])
            # Set the sign on the bits: a branch on random bits would take three times as long.
            values[i] = float_of(bits_in(mean[code >> uint32(1)]) | (code & uint32(1)) << uint32(31))


_TRITS = (np.arange(243)[:, None] // 3 ** np.arange(5) % 3).astype(np.uint8)


def _packing(bits):
    """Make both functions of :data:`packing` for one width. A fixed width makes them ten times faster."""
    each = 8 // bits if 8 % bits == 0 else 0  # codes that fill a byte
    mask = (1 << bits) - 1

    @entry
    def packed(codes, out):
        whole = codes.size // each if each else 0
        for at in range(whole):
            byte = uint8(0)
            for j in range(each):
                byte |= codes[each * at + j] << bits * j
            out[at] = byte
        at, pending, filled = whole, uint64(0), 0
        for i in range(whole * each, codes.size):
            pending |= uint64(codes[i]) << uint64(filled)
            filled += bits
            while filled >= 8:
                out[at] = uint8(pending & uint64(255))
                at += 1
                pending >>= uint64(8)
                filled -= 8
        if filled > 0:
            out[at] = uint8(pending & uint64(255))

    @entry
    def unpacked(data, codes):
        whole = codes.size // each if each else 0
        for at in range(whole):
            for j in range(each):
                codes[each * at + j] = data[at] >> bits * j & mask
        at, pending, filled = whole, uint64(0), 0
        for i in range(whole * each, codes.size):
            while filled < bits:
                pending |= uint64(data[at]) << uint64(filled)
                at += 1
                filled += 8
            codes[i] = uint8(pending & uint64(mask))
            pending >>= uint64(bits)
            filled -= bits

    return packed, unpacked


# ``packing[bits]`` is a pair of functions for codes of this many bits. The first, ``(codes, out)``, packs the low bits
# of the codes, lowest first, into ceil(n*bits/8) bytes. The second, ``(data, codes)``, unpacks them.
packing = {bits: _packing(bits) for bits in range(1, 9)}


@entry
def pack_trits(codes: np.ndarray, out: np.ndarray) -> None:
    """Pack codes of 0, 1 and 2 into ceil(n/5) bytes, five per byte as a number to the base 3."""
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


@entry
def unpack_trits(data: np.ndarray, codes: np.ndarray) -> bool:
    """Undo :func:`pack_trits`; return False if a byte is above 242, which :func:`pack_trits` never writes."""
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


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-32
_LANES = 64  # interleaved sums, so that additions do not wait for each other
_LARGEST = np.finfo(np.float32).max


@helper
def _uniform(key, i):
    """Return random number i of a key, 32 bits in [0, 1), by SplitMix64 (Steele et al. 2014)."""
    z = key + (uint64(i) + uint64(1)) * _GOLDEN
    z = (z ^ (z >> uint64(30))) * _MIX1
    z = (z ^ (z >> uint64(27))) * _MIX2
    z = z ^ (z >> uint64(31))
    return float(z >> uint64(32)) * _TO_UNIT


@entry
def uniform(key: np.uint64, out: np.ndarray) -> None:
    """Fill (n,) float64 with random numbers in [0, 1). Number i depends only on the 64-bit key and on i."""
    for i in range(out.size):
        out[i] = _uniform(key, i)


@entry
def norms(x: np.ndarray, group: int, squared: bool, out: np.ndarray) -> None:
    """Write each group's largest magnitude, or with ``squared`` its L2 norm, to (ceil(n/group),) float64 ``out``."""
    sums = np.empty(_LANES)
    for g in range(out.size):
        part = x[g * group : min((g + 1) * group, x.size)]
        largest = 0.0
        for value in part:
            largest = max(largest, abs(np.float64(value)))
        out[g] = largest
        if squared:
            sums[:] = 0.0
            for start in range(0, part.size, _LANES):
                for j in range(min(_LANES, part.size - start)):
                    sums[j] += np.float64(part[start + j]) * np.float64(part[start + j])
            out[g] = max(largest, np.sqrt(sums.sum()))


@entry
def spread(x: np.ndarray) -> tuple[float, float]:
    """Return the largest magnitude and the standard deviation of (n,) finite floats, n > 0."""
    sums = np.zeros(_LANES)
    largest = 0.0
    for start in range(0, x.size, _LANES):
        for j in range(min(_LANES, x.size - start)):
            value = np.float64(x[start + j])
            largest = max(largest, abs(value))
            sums[j] += value
    mean = sums.sum() / x.size
    sums[:] = 0.0
    for start in range(0, x.size, _LANES):
        for j in range(min(_LANES, x.size - start)):
            difference = np.float64(x[start + j]) - mean
            sums[j] += difference * difference
    return largest, np.sqrt(sums.sum() / x.size)


@entry
def round_signed(
    x: np.ndarray, scales: np.ndarray, group: int, limit: float, levels: int, key: np.uint64, codes: np.ndarray
) -> None:
    """Round ``sign(x) * min(|x|, limit) / scale * levels`` at random to a neighbouring integer, without bias.

    Args:
        x: (n,) finite floats.
        scales: (ceil(n / group),) float32; elements with the scale 0 become 0.
        group: elements that share a scale.
        limit: larger magnitudes become this number.
        levels: the largest integer; the code is the rounded number plus ``levels``.
        key: the key of the random numbers.
        codes: filled.
    """
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
            # Limit the number before the conversion: an integer cannot hold every float64.
            level = int(min(float(levels), magnitude * factor + _uniform(key, i)))
            codes[i] = levels - level if value < 0 else levels + level


@entry
def scale_signed(codes: np.ndarray, scales: np.ndarray, group: int, levels: int, out: np.ndarray) -> bool:
    """Turn codes of :func:`round_signed` into (n,) float32; return False if a code is above ``2 * levels``."""
    most = 2 * levels
    good = True
    for g in range(scales.size):
        unit = scales[g] / np.float32(levels)
        for i in range(g * group, min((g + 1) * group, codes.size)):
            good &= codes[i] <= most
            # 127 * float32(largest / 127) may round to infinity.
            out[i] = min(max(np.float32(int(codes[i]) - levels) * unit, -_LARGEST), _LARGEST)
    return good


@entry
def scale_span(codes: np.ndarray, scale: np.float32, levels: int, out: np.ndarray) -> None:
    """Turn codes of :func:`round_span` into (n,) float32: ``(2 * code - levels) * (scale / levels)``."""
    unit = scale / np.float32(levels)
    for i in range(codes.size):
        out[i] = np.float32(2 * int(codes[i]) - levels) * unit


@entry
def round_span(x: np.ndarray, scale: float, levels: int, key: np.uint64, codes: np.ndarray) -> None:
    """Round ``(x / (2 scale) + 1/2) * levels`` at random to a neighbouring integer from 0 to ``levels``."""
    if scale == 0.0:
        for i in range(x.size):
            codes[i] = 0
        return
    half = 0.5 / scale
    for i in range(x.size):
        place = (float(x[i]) * half + 0.5) * levels
        codes[i] = int(max(0.0, min(float(levels), np.floor(place + _uniform(key, i)))))


@entry
def split_means(x: np.ndarray, means: np.ndarray, signs: np.ndarray) -> None:
    """Compute the means of the negative and of the other entries of each column.

    Args:
        x: (outer, columns, inner) floats.
        means: (2, columns) float32, filled: the mean of the entries below 0, and of the others; 0 if there are none.
        signs: (outer * columns * inner,) uint8, filled: 0 for an entry below 0, else 1.
    """
    outer, columns, inner = x.shape
    # Several sums per column, so that additions do not wait for each other.
    lanes = 1 if inner == 1 else _LANES
    low, high, above = np.zeros((columns, lanes)), np.zeros((columns, lanes)), np.zeros(columns, np.int64)
    at = 0
    for o in range(outer):
        if inner == 1:
            for c in range(columns):
                value = np.float64(x[o, c, 0])
                negative = value < 0
                signs[at + c] = 0 if negative else 1
                low[c, 0] += value if negative else 0.0
                high[c, 0] += 0.0 if negative else value
                above[c] += 0 if negative else 1
            at += columns
            continue
        for c in range(columns):
            run, count = x[o, c], 0
            for start in range(0, inner, _LANES):
                for j in range(min(_LANES, inner - start)):
                    value = np.float64(run[start + j])
                    negative = value < 0
                    signs[at + start + j] = 0 if negative else 1
                    low[c, j] += value if negative else 0.0
                    high[c, j] += 0.0 if negative else value
                    count += 0 if negative else 1
            above[c] += count
            at += inner
    for c in range(columns):
        below = outer * inner - above[c]
        means[0, c] = low[c].sum() / below if below else 0.0
        means[1, c] = high[c].sum() / above[c] if above[c] else 0.0


@entry
def spread_means(signs: np.ndarray, means: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out``, (outer, columns, inner) float32, with the mean of each entry's sign."""
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
