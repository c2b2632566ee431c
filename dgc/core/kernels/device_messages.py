"""Which message formats the device writes and reads itself, and the checks of what came before it reads.

n elements of a bucket's sparsified part, k entries. Other formats (bit-packed, quantised) are written and read on the
host, from entries that are copied there and back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgc.core.errors import WireError
from dgc.core.kernels.jit import entry
from dgc.core.wire import IndexCodec, IndexCodecId, ValueCodec, ValueCodecId, padded

_INDICES = {int(IndexCodecId.INT32): 0, int(IndexCodecId.UINT16): 1}
_VALUES = {
    int(ValueCodecId.FLOAT32): 0,
    int(ValueCodecId.FLOAT64): 1,
    int(ValueCodecId.FLOAT16): 2,
    int(ValueCodecId.BFLOAT16): 3,
}
_FLOAT16 = 2
_UINT16 = 1
WIRE_TILE = 65536


@dataclass(frozen=True)
class Format:
    """How a message's entries lie, as the kernels know it (the codes of message.cu)."""

    indices: int
    values: int

    def blocks(self, n: int, count: int) -> int:
        """Blocks that :func:`receive` wants to be launched with."""
        return max(1, -(-n // WIRE_TILE) if self.indices == _UINT16 else -(-count // 1024))

    def check(self, payload: np.ndarray, n: int, count: int, index_codec: IndexCodec) -> None:
        """Refuse a damaged payload before anything of it is applied.

        Args:
            payload: (m,) uint8, aligned to 8 bytes, on the host.
            n: elements of the bucket.
            count: entries, from the header.
            index_codec: the codec of the indices, for the error.

        Raises:
            WireError: the positions are not ascending or not within the bucket, or the scale is out of range.
        """
        if not 0 <= count <= n:
            raise WireError(f"{index_codec.name}: the message claims {count} entries in a bucket of {n} elements")
        used = index_codec.max_bytes(n, count)
        if payload.size < used:
            raise WireError(f"{index_codec.name}: the block takes {used} bytes, the message has {payload.size}")
        if self.indices == _UINT16:
            tiles = -(-n // WIRE_TILE)
            table = padded(4 * tiles)
            sound = _tiles_are_sound(
                payload[: 4 * tiles].view(np.uint32), payload[table : table + 2 * count].view(np.uint16), n
            )
        else:
            sound = _ascending(payload[: 4 * count].view(np.int32), n)
        if not sound:
            raise WireError(
                f"{index_codec.name}: positions are not strictly ascending within the bucket's {n} elements. "
                "The message is damaged, or was written for another layout."
            )
        if self.values == _FLOAT16:
            exponent = int(payload[used : used + 4].view(np.int32)[0])
            if not -163 <= exponent <= 113:
                raise WireError(f"float16: the scale's exponent is {exponent}, it must be in -163..113")


def device_format(indices: IndexCodec, values: ValueCodec) -> Format | None:
    """The format of a pair of codecs, or None when the host has to do the work."""
    if int(indices.id) in _INDICES and int(values.id) in _VALUES:
        return Format(_INDICES[int(indices.id)], _VALUES[int(values.id)])
    return None


@entry()
def _tiles_are_sound(counts, offsets, n):  # type: ignore[no-untyped-def]
    at = 0
    for tile in range(len(counts)):
        stop = at + int(counts[tile])
        if stop > len(offsets):
            return False
        last = -1
        while at < stop:
            here = int(offsets[at])
            if here <= last:
                return False
            last = here
            at += 1
        if tile * WIRE_TILE + last >= n:
            return False
    return at == len(offsets)


@entry()
def _ascending(positions, n):  # type: ignore[no-untyped-def]
    last = -1
    for position in positions:
        if position <= last:
            return False
        last = position
    return last < n
