"""Rules that all blocks of a message share: padding, and no byte read or written outside the block."""

from __future__ import annotations

import numpy as np

from dgc.errors import WireError

BLOCK_ALIGNMENT = 8
"""Every block's length is a multiple of this, so that the block after it can be read as words (GPUs insist)."""


def padded(nbytes: int) -> int:
    """Return the smallest multiple of 8 that is at least ``nbytes``."""
    return (nbytes + BLOCK_ALIGNMENT - 1) // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT


def words_for(bits: int) -> int:
    """Return how many 64-bit words hold this many bits."""
    return (bits + 63) // 64


def block_to_write(out: np.ndarray, nbytes: int, what: str) -> np.ndarray:
    """:func:`block_to_read` for a codec that is about to write the block."""
    return _first(out, nbytes, what, "{} left for it. Size the message with max_bytes().")


def block_to_read(data: np.ndarray, nbytes: int, what: str) -> np.ndarray:
    """Return the first ``nbytes`` of ``data``.

    Args:
        data: (m,) uint8, contiguous.
        nbytes: length of the block.
        what: the codec's name, for the error.

    Raises:
        WireError: ``data`` is not such an array, or is shorter (a truncated message).
    """
    return _first(data, nbytes, what, "only {} left. It was cut short, or its header does not belong to it.")


def as_words(block: np.ndarray) -> np.ndarray:
    """View a block of whole words as little-endian uint64; a copy where the memory is not aligned for that."""
    words = block.view("<u8")
    return words if words.flags.aligned else words.copy()


def _first(array: np.ndarray, nbytes: int, what: str, left: str) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise WireError(
            f"{what}: a message is a contiguous one-dimensional uint8 array, not {array.dtype} of shape {array.shape}."
        )
    if array.size < nbytes:
        raise WireError(f"{what}: the block takes {nbytes} bytes, the message has {left.format(array.size)}")
    return array[:nbytes]
