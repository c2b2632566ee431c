"""The loops of the quantising compressors, compiled by Numba; to be imported on first use, since Numba loads slowly.

Letters: n elements. *codes* are (n,) uint8 small numbers, one for each element, before they are packed. No loop reads
or writes outside the arrays that it is given.

They call nothing outside this file: it alone decides when compiled code is out of date. All hashing is in uint64, since
Numba turns a mix of int64 and uint64 into float64. ``codes`` says in which order is added up.
"""

from __future__ import annotations

import numpy as np
from numba import uint64

from dgc.core.kernels.compile import entry, helper

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-32
_TILE, _ROWS = 4096, 64  # as in ``codes``
_LARGEST = np.finfo(np.float32).max


@helper
def _uniform(key, i):
    """Random number i of a key, in [0, 1) with 32 bits: SplitMix64 (Steele et al. 2014), which can start anywhere."""
    z = key + (uint64(i) + uint64(1)) * _GOLDEN
    z = (z ^ (z >> uint64(30))) * _MIX1
    z = (z ^ (z >> uint64(27))) * _MIX2
    z = z ^ (z >> uint64(31))
    return float(z >> uint64(32)) * _TO_UNIT


@entry(__file__)
def uniform(key: np.uint64, out: np.ndarray) -> None:
    """Fill (n,) float64 with random numbers in [0, 1); number i depends on the 64-bit key and on i alone."""
    for i in range(out.size):
        out[i] = _uniform(key, i)


@helper
def _cleared(sums, size):
    """Set to 0 what :func:`_halved` reads of ``size`` sums."""
    for j in range(32 * ((size + 31) // 32) if size > 16 else 16 if size > 8 else 8):
        sums[j] = 0.0


@helper
def _halved(sums, first, size):
    """32 sums from ``first`` on as one, in the order of ``codes``. All but the first ``size`` are 0, and none is -0."""
    if size > 16:
        for j in range(first, first + 16):
            sums[j] += sums[j + 16]
    if size > 8:
        for j in range(first, first + 8):
            sums[j] += sums[j + 8]
    for j in range(first, first + 4):
        sums[j] += sums[j + 4]
    return (sums[first] + sums[first + 2]) + (sums[first + 1] + sums[first + 3])


@helper
def _tile_sum(sums, size):
    """256 sums as one; all but the first ``size`` are 0."""
    total = 0.0
    for first in range(0, min(size, 256), 32):
        total += _halved(sums, first, size - first)
    return total


@entry(__file__)
def norms(x: np.ndarray, group: int, squared: bool, out: np.ndarray) -> None:
    """Each group's largest magnitude, or with ``squared`` its L2 norm if larger: (ceil(n/group),) float64."""
    sums = np.empty(32)
    for g in range(out.size):
        largest = 0.0
        stop = min((g + 1) * group, x.size)
        if not squared:
            for i in range(g * group, stop):
                largest = max(largest, abs(np.float64(x[i])))
            out[g] = largest
            continue
        _cleared(sums, min(32, stop - g * group))
        for start in range(g * group, stop, 32):
            for j in range(min(32, stop - start)):
                magnitude = abs(np.float64(x[start + j]))
                largest = max(largest, magnitude)
                sums[j] += magnitude * magnitude
        out[g] = max(largest, np.sqrt(_halved(sums, 0, stop - g * group)))


@entry(__file__)
def moments(x: np.ndarray, out: np.ndarray) -> None:
    """Of each tile of (n,) finite floats the largest magnitude, the sum, and the squares' sum about the mean.

    Args:
        x: the floats.
        out: (tiles, 3) float64, written; see :func:`~dgc.core.compressors.quantizers.codes.magnitude_and_deviation`.
    """
    sums = np.empty(256)
    for tile in range(len(out)):
        stop = min((tile + 1) * _TILE, x.size)
        largest = 0.0
        sums[:] = 0.0
        for start in range(tile * _TILE, stop, 256):
            for j in range(min(256, stop - start)):
                value = np.float64(x[start + j])
                largest = max(largest, abs(value))
                sums[j] += value
        total = _tile_sum(sums, stop - tile * _TILE)
        mean = total / (stop - tile * _TILE)
        sums[:] = 0.0
        for start in range(tile * _TILE, stop, 256):
            for j in range(min(256, stop - start)):
                difference = np.float64(x[start + j]) - mean
                sums[j] += difference * difference
        out[tile, 0] = largest
        out[tile, 1] = total
        out[tile, 2] = _tile_sum(sums, stop - tile * _TILE)


@entry(__file__)
def round_signed(
    x: np.ndarray, scales: np.ndarray, group: int, limit: float, levels: int, key: np.uint64, codes: np.ndarray
) -> None:
    """Round ``sign(x) * min(|x|, limit) / scale * levels`` at random to a neighbouring integer, without bias.

    Args:
        x: (n,) finite floats.
        scales: (ceil(n / group),) float32, of each ``group`` elements; where it is 0 all become 0.
        group: elements that share a scale.
        limit: magnitudes are cut there.
        levels: the largest integer; the code is the rounded number plus ``levels``.
        key: of the random numbers.
        codes: written.
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
            # Cut before it becomes an integer, which has no room for all of float64.
            level = int(min(float(levels), magnitude * factor + _uniform(key, i)))
            codes[i] = levels - level if value < 0 else levels + level


@entry(__file__)
def scale_signed(codes: np.ndarray, scales: np.ndarray, group: int, levels: int, out: np.ndarray) -> bool:
    """Turn codes of :func:`round_signed` into (n,) float32; returns False where a code is above ``2 * levels``."""
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
def scale_span(codes: np.ndarray, scale: np.float32, levels: int, out: np.ndarray) -> None:
    """Turn codes of :func:`round_span` into (n,) float32: ``(2 * code - levels) * (scale / levels)``."""
    unit = scale / np.float32(levels)
    for i in range(codes.size):
        out[i] = np.float32(2 * int(codes[i]) - levels) * unit


@entry(__file__)
def round_span(x: np.ndarray, scale: float, levels: int, key: np.uint64, codes: np.ndarray) -> None:
    """Round ``(x / (2 scale) + 1/2) * levels`` at random to a neighbouring integer of 0 to ``levels``."""
    if scale == 0.0:
        for i in range(x.size):
            codes[i] = 0
        return
    half = 0.5 / scale
    for i in range(x.size):
        place = (float(x[i]) * half + 0.5) * levels
        codes[i] = int(max(0.0, min(float(levels), np.floor(place + _uniform(key, i)))))


@helper
def _split_rows(x, low, high, above, signs):
    """The sums of the columns of (rows, columns, 1), of pieces of some rows."""
    rows, columns, _ = x.shape
    below_sums, above_sums = np.zeros(columns), np.zeros(columns)
    for o in range(rows):
        for c in range(columns):
            value = np.float64(x[o, c, 0])
            negative = value < 0
            signs[o * columns + c] = 0 if negative else 1
            below_sums[c] += value if negative else 0.0
            above_sums[c] += 0.0 if negative else value
            above[c] += 0 if negative else 1
        if (o + 1) % _ROWS == 0 or o == rows - 1:
            for c in range(columns):
                low[c] += below_sums[c]
                high[c] += above_sums[c]
                below_sums[c] = 0.0
                above_sums[c] = 0.0


@helper
def _split_run(x, c, low, high, above, signs, below_sums, above_sums):
    """The sums of one column that lies in one piece, tile by tile; room for 256 sums of either sign is given."""
    count = 0
    for tile in range(0, x.size, _TILE):
        stop = min(tile + _TILE, x.size)
        _cleared(below_sums, min(256, stop - tile))
        _cleared(above_sums, min(256, stop - tile))
        for start in range(tile, stop, 256):
            for j in range(min(256, stop - start)):
                value = np.float64(x[start + j])
                negative = value < 0
                signs[start + j] = 0 if negative else 1
                below_sums[j] += value if negative else 0.0
                above_sums[j] += 0.0 if negative else value
                count += 0 if negative else 1
        low[c] += _tile_sum(below_sums, stop - tile)
        high[c] += _tile_sum(above_sums, stop - tile)
    above[c] += count


@entry(__file__)
def split_means(x: np.ndarray, means: np.ndarray, signs: np.ndarray) -> None:
    """Means of the negative and of the other entries of each column.

    Args:
        x: (outer, columns, inner) floats.
        means: (2, columns) float32, written: of those below 0, of the others; 0 where there are none.
        signs: (outer * columns * inner,) uint8, written: 1 unless below 0.
    """
    outer, columns, inner = x.shape
    low, high, above = np.zeros(columns), np.zeros(columns), np.zeros(columns, np.int64)
    if inner == 1:
        _split_rows(x, low, high, above, signs)
    else:
        at = 0
        below_sums, above_sums = np.empty(256), np.empty(256)
        for o in range(outer):
            for c in range(columns):
                _split_run(x[o, c], c, low, high, above, signs[at : at + inner], below_sums, above_sums)
                at += inner
    for c in range(columns):
        below = outer * inner - above[c]
        means[0, c] = low[c] / below if below else 0.0
        means[1, c] = high[c] / above[c] if above[c] else 0.0


@entry(__file__)
def spread_means(signs: np.ndarray, means: np.ndarray, out: np.ndarray) -> None:
    """Undo :func:`split_means` as far as it goes: ``out`` (outer, columns, inner) float32."""
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
