"""The index codecs: ``int32`` and ``uint16`` are plain arrays, ``elias_fano`` is two bit vectors.

n = elements of the bucket, k = entries.

Golomb-Rice would reserve as many bits in the worst case, and its entries wait for one another.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dgc.core.wire.codecs.base import IndexCodecId
from dgc.core.wire.codecs.blocks import as_words, block_of, padded, words_for
from dgc.errors import ConfigError, WireError

_TILE_BITS = 16
_TILE = 1 << _TILE_BITS


def check_sizes(n: int, k: int, limit: int, name: str) -> None:
    """Refuse k entries of n elements where n is not below a codec's limit, or k not within 0..n.

    Raises:
        ConfigError: otherwise.
    """
    if not 0 <= n < limit:
        raise ConfigError(
            f"indices={name!r} addresses fewer than {limit} elements in a bucket, this bucket has {n}. Lower "
            "bucket_bytes, or choose another index codec."
        )
    if not 0 <= k <= n:
        raise ConfigError(f"indices={name!r}: {k} entries cannot be chosen from {n} elements.")


def check_count(n: int, count: int, name: str) -> None:
    """Refuse a count that no bucket of n elements can have.

    Raises:
        WireError: count is not within 0..n.
    """
    if not 0 <= count <= n:
        raise WireError(f"{name}: the message claims {count} entries in a bucket of {n} elements. It is damaged.")


def check_positions(positions: np.ndarray, n: int, name: str) -> None:
    """Refuse positions that are not strictly ascending in [0, n).

    Raises:
        WireError: otherwise.
    """
    if positions.size == 0:
        return
    first, last = int(positions[0]), int(positions[-1])
    if first < 0 or last >= n:
        raise WireError(f"{name}: positions run from {first} to {last}, the bucket from 0 to {n - 1}. {_DAMAGED}")
    if not bool((positions[1:] > positions[:-1]).all()):
        raise WireError(f"{name}: positions are not strictly ascending. {_DAMAGED}")


_DAMAGED = "The message is damaged, or was written for another layout."


class Int32Indices:
    """Positions as they are, 32 bits each."""

    id = IndexCodecId.INT32
    name = "int32"
    LIMIT = 1 << 31

    def max_bytes(self, n: int, k: int) -> int:  # noqa: D102
        check_sizes(n, k, self.LIMIT, self.name)
        return padded(4 * k)

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write positions; does not check their order. See :class:`~dgc.core.wire.codecs.base.IndexCodec`."""
        k = positions.size
        block = block_of(out, self.max_bytes(n, k), self.name, writes=True)
        block[: 4 * k].view("<i4")[...] = positions
        block[4 * k :] = 0
        return block.size

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:  # noqa: D102
        check_count(n, count, self.name)
        block = block_of(data, self.max_bytes(n, count), self.name)
        positions = block[: 4 * count].view("<i4").astype(np.int64)
        check_positions(positions, n, self.name)
        return positions, block.size


class Uint16Indices:
    """16-bit offsets in tiles of 65 536 elements, after a table of the tiles' entry counts.

    16 bits an entry and 32 bits a tile: 16.5 bits at 0.1 %. As quick to read as it gets, and the default.
    """

    id = IndexCodecId.UINT16
    name = "uint16"
    LIMIT = 1 << 47  # 2^31 tiles

    def max_bytes(self, n: int, k: int) -> int:  # noqa: D102
        check_sizes(n, k, self.LIMIT, self.name)
        return padded(4 * tiles_of(n)) + padded(2 * k)

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write positions; does not check their order. See :class:`~dgc.core.wire.codecs.base.IndexCodec`."""
        from dgc.core.wire.codecs import numba_loops as loops

        k = positions.size
        block = block_of(out, self.max_bytes(n, k), self.name, writes=True)
        tiles = tiles_of(n)
        table = padded(4 * tiles)
        low = block[table : table + 2 * k].view(np.uint16)
        loops.to_tiles(positions, block[: 4 * tiles].view(np.uint32), low)
        block[4 * tiles : table] = 0
        block[table + 2 * k :] = 0
        return block.size

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:  # noqa: D102
        check_count(n, count, self.name)
        block = block_of(data, self.max_bytes(n, count), self.name)
        tiles, table = tiles_of(n), block.size - padded(2 * count)
        counts = block[: 4 * tiles].view("<u4").astype(np.int64)
        # Before np.repeat, which would otherwise allocate whatever a damaged table asks for.
        total = int(counts.sum())
        if total != count:
            raise WireError(f"{self.name}: the tiles hold {total} entries, the header says {count}. {_DAMAGED}")
        positions = np.repeat(np.arange(tiles, dtype=np.int64) << _TILE_BITS, counts)
        positions += block[table : table + 2 * count].view("<u2")
        check_positions(positions, n, self.name)
        return positions, block.size


def tiles_of(n: int) -> int:
    """Tiles of 65 536 elements that n elements begin."""
    return (n + _TILE - 1) >> _TILE_BITS


@lru_cache(maxsize=1024)
def elias_fano_shape(n: int, k: int) -> tuple[int, int, int]:
    """Return the low bits' width and the words of both parts for k entries below n.

    The width, 0..47, is the smallest of those that make the block shortest; the length never falls when k grows.

    Source: Elias 1974, "Efficient storage and retrieval by content and address of static files"; Fano 1971.
    """
    if k == 0:
        return 0, 0, 0
    shapes = ((w, words_for(k * w), words_for(k + ((n - 1) >> w))) for w in range(max(n - 1, 1).bit_length()))
    return min(shapes, key=lambda shape: shape[1] + shape[2])


class EliasFanoIndices:
    """Near the entropy: 11.95 bits an entry at 0.1 % and 8.56 at 1 %, where 11.41 and 8.08 are possible.

    Low part: the low w bits of each position, one after the other. High part: a bit vector in which entry i with
    high part h sets bit h + i, so that h zeros and i ones stand before it.
    """

    id = IndexCodecId.ELIAS_FANO
    name = "elias_fano"
    LIMIT = 1 << 48  # bits shift freely in int64, and no machine holds as many elements

    def max_bytes(self, n: int, k: int) -> int:  # noqa: D102
        check_sizes(n, k, self.LIMIT, self.name)
        _, low_words, high_words = elias_fano_shape(n, k)
        return 8 * (low_words + high_words)

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:  # noqa: D102
        from dgc.core.wire.codecs import numba_loops as loops

        block = block_of(out, self.max_bytes(n, positions.size), self.name, writes=True)
        words = as_words(block)
        width, low, _ = elias_fano_shape(n, positions.size)
        written = loops.elias_fano_encode(positions, n, width, words[:low], words[low:])
        if written != positions.size:
            raise WireError(
                f"{self.name}: entry {written} of {positions.size} is {positions[written]}: positions must be strictly "
                f"ascending in 0..{n - 1}. The selection that made them is wrong."
            )
        if not np.may_share_memory(words, block):  # the block was not aligned, so the words are a copy
            block.view("<u8")[...] = words
        return block.size

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:  # noqa: D102
        from dgc.core.wire.codecs import numba_loops as loops

        check_count(n, count, self.name)
        block = block_of(data, self.max_bytes(n, count), self.name)
        words, positions = as_words(block), np.empty(count, np.int64)
        width, low, _ = elias_fano_shape(n, count)
        found = loops.elias_fano_decode(words[:low], words[low:], n, width, positions)
        if found != count:
            raise WireError(
                f"{self.name}: {min(found, count)} of {count} positions are strictly ascending in 0..{n - 1}"
                f"{', and more follow' if found > count else ''}. {_DAMAGED}"
            )
        return positions, block.size
