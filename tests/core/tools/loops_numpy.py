"""The oracle of the quantising compressors' loops, in NumPy."""

from __future__ import annotations

import numpy as np

from dgc.core.compressors.quantizers import ROWS, TILE

_U64 = np.uint64
_LARGEST = np.finfo(np.float32).max


def uniform(key: np.uint64, out: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        z = _U64(key) + np.arange(1, out.size + 1, dtype=_U64) * _U64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    z ^= z >> _U64(31)
    out[...] = (z >> _U64(32)).astype(np.float64) * 2.0**-32


def pack(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    string = (codes[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(string.astype(np.uint8).reshape(-1), bitorder="little")
    out[: packed.size] = packed


def unpack(data: np.ndarray, bits: int, codes: np.ndarray) -> None:
    string = np.unpackbits(data, count=codes.size * bits, bitorder="little").reshape(-1, bits)
    codes[...] = (string << np.arange(bits, dtype=np.uint8)).sum(1)


def pack_trits(codes: np.ndarray, out: np.ndarray) -> None:
    groups = -(-codes.size // 5)
    padded = np.zeros(5 * groups, np.int64)
    padded[: codes.size] = codes
    out[:groups] = padded.reshape(groups, 5) @ (3 ** np.arange(5))


def unpack_trits(data: np.ndarray, codes: np.ndarray) -> bool:
    groups = -(-codes.size // 5)
    values = data[:groups].astype(np.int64)
    codes[...] = (values[:, None] // 3 ** np.arange(5) % 3).reshape(-1)[: codes.size]
    return bool((values <= 242).all())


def norms(x: np.ndarray, group: int, squared: bool, out: np.ndarray) -> None:
    for g in range(out.size):
        part = np.abs(x[g * group : (g + 1) * group].astype(np.float64))
        out[g] = max(part.max(), np.sqrt(_sum(part * part, 32))) if squared else part.max()


def _sum(values: np.ndarray, lanes: int) -> float:
    """In the order that ``codes`` writes down."""
    rows = np.zeros((-(-values.size // lanes), lanes))
    rows.reshape(-1)[: values.size] = values
    sums = np.zeros(lanes)
    for row in rows:
        sums += row
    parts = sums.reshape(-1, 32)
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    return sum(parts[:, 0].tolist(), 0.0)


def moments(x: np.ndarray, out: np.ndarray) -> None:
    for tile in range(len(out)):
        part = x[tile * TILE : (tile + 1) * TILE].astype(np.float64)
        total = _sum(part, 256)
        apart = part - total / part.size
        out[tile] = np.abs(part).max(), total, _sum(apart * apart, 256)


def round_signed(
    x: np.ndarray, scales: np.ndarray, group: int, limit: float, levels: int, key: np.uint64, codes: np.ndarray
) -> None:
    scale = np.repeat(scales.astype(np.float64), group)[: x.size]
    random = np.empty(x.size)
    uniform(key, random)
    factor = np.divide(levels, scale, out=np.zeros_like(scale), where=scale > 0)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), limit)
    level = np.minimum(levels, magnitude * factor + random).astype(np.int64)
    codes[...] = levels + np.where(x < 0, -level, level)


def scale_signed(codes: np.ndarray, scales: np.ndarray, group: int, levels: int, out: np.ndarray) -> bool:
    unit = np.repeat(scales / np.float32(levels), group)[: codes.size]
    with np.errstate(over="ignore"):
        out[...] = (codes.astype(np.float32) - np.float32(levels)) * unit
        np.clip(out, -_LARGEST, _LARGEST, out=out)
    return bool((codes <= 2 * levels).all())


def scale_span(codes: np.ndarray, scale: np.float32, levels: int, out: np.ndarray) -> None:
    out[...] = (2 * codes.astype(np.int64) - levels).astype(np.float32) * (scale / np.float32(levels))


def round_span(x: np.ndarray, scale: float, levels: int, key: np.uint64, codes: np.ndarray) -> None:
    if scale == 0:
        codes[...] = 0
        return
    random = np.empty(x.size)
    uniform(key, random)
    place = (x.astype(np.float64) * (0.5 / scale) + 0.5) * levels
    codes[...] = np.clip(np.floor(place + random), 0, levels)


def split_means(x: np.ndarray, means: np.ndarray, signs: np.ndarray) -> None:
    high = ~(x < 0)
    signs[...] = high.reshape(-1)
    for side, members in enumerate((~high, high)):
        values = np.where(members, x, 0).astype(np.float64)
        sums = _down(values[:, :, 0]) if x.shape[2] == 1 else _along(values)
        means[side] = sums / np.maximum(members.sum((0, 2)), 1)


def _down(matrix: np.ndarray) -> np.ndarray:
    sums = np.zeros(matrix.shape[1])
    for first in range(0, len(matrix), ROWS):
        piece = np.zeros(matrix.shape[1])
        for row in matrix[first : first + ROWS]:
            piece += row
        sums += piece
    return sums


def _along(x: np.ndarray) -> np.ndarray:
    sums = np.zeros(x.shape[1])
    for matrix in x:
        for c, run in enumerate(matrix):
            for first in range(0, run.size, TILE):
                sums[c] += _sum(run[first : first + TILE], 256)
    return sums


def spread_means(signs: np.ndarray, means: np.ndarray, out: np.ndarray) -> None:
    out[...] = np.where(signs.reshape(out.shape), means[1][:, None], means[0][:, None])
