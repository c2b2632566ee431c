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


def block_of(array: np.ndarray, nbytes: int, what: str, *, writes: bool = False) -> np.ndarray:
    """Return the first ``nbytes`` of ``array``, (m,) uint8, contiguous.

    Args:
        array: what is left of the message.
        nbytes: length of the block.
        what: the codec's name, for the error.
        writes: whether the block is about to be written.

    Raises:
        WireError: ``array`` is something else, or shorter (a truncated message).
    """
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise WireError(
            f"{what}: a message is a contiguous one-dimensional uint8 array, not {array.dtype} of shape {array.shape}."
        )
    if array.size < nbytes:
        left = "{} left for it. Size the message with max_bytes()."
        if not writes:
            left = "only {} left. It was cut short, or its header does not belong to it."
        raise WireError(f"{what}: the block takes {nbytes} bytes, the message has {left.format(array.size)}")
    return array[:nbytes]


def as_words(block: np.ndarray) -> np.ndarray:
    """View a block of whole words as little-endian uint64; a copy where the memory is not aligned for that."""
    words = block.view("<u8")
    return words if words.flags.aligned else words.copy()
