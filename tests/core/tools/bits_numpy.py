"""The oracle of the bit loops of :mod:`dgc.core.loops`, in NumPy."""

from __future__ import annotations

import numpy as np


def elias_fano_encode(positions: np.ndarray, n: int, width: int, low: np.ndarray, high: np.ndarray) -> int:
    good = _in_order(positions, n)
    if good < positions.size:
        return good
    if width > 0:
        bits = (positions[:, None] >> np.arange(width)) & 1
        _write_bits(bits.astype(np.uint8).reshape(-1), low)
    _set_bits((positions >> width) + np.arange(positions.size), high)
    return positions.size


def elias_fano_decode(low: np.ndarray, high: np.ndarray, n: int, width: int, positions: np.ndarray) -> int:
    count = positions.size
    found = _find_bits(high)
    entries = min(found.size, count)
    decoded = (found[:entries] - np.arange(entries)) << width
    if width > 0:
        start = np.arange(entries) * width
        at = start >> 6
        shift = (start & 63).astype(np.uint64)
        bits = low[at] >> shift
        # The rest of an entry that straddles two words; a shift by 64 is undefined, hence the mask of straddlers.
        straddles = np.flatnonzero(shift + np.uint64(width) > 64)
        bits[straddles] |= low[at[straddles] + 1] << (np.uint64(64) - shift[straddles])
        decoded |= (bits & np.uint64((1 << width) - 1)).astype(np.int64)
    return _deliver(decoded, found.size, n, positions)


def _in_order(positions: np.ndarray, n: int) -> int:
    """Number of leading entries that are strictly ascending in [0, n)."""
    bad = (positions < 0) | (positions >= n)
    bad[1:] |= positions[1:] <= positions[:-1]
    return int(bad.argmax()) if bad.any() else positions.size


def _deliver(decoded: np.ndarray, found: int, n: int, positions: np.ndarray) -> int:
    good = _in_order(decoded, n)
    positions[:good] = decoded[:good]
    return good if good < decoded.size or found <= positions.size else positions.size + 1


def _write_bits(bits: np.ndarray, words: np.ndarray) -> None:
    data = np.packbits(bits, bitorder="little")
    view = words.view(np.uint8)
    view[: data.size] = data
    view[data.size :] = 0


def _set_bits(where: np.ndarray, words: np.ndarray) -> None:
    bits = np.zeros(64 * words.size, np.uint8)
    bits[where] = 1
    _write_bits(bits, words)


def _find_bits(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
