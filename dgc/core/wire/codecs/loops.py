"""The loops of the codecs in Numba, loaded on first use; the default codecs do without where it is missing."""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import numpy as np

from dgc.errors import ConfigError

logger = logging.getLogger("dgc")


class BitKernels(Protocol):
    """Four loops over 64-bit words. Each returns how many entries were in order; fewer than given means an error."""

    def elias_fano_encode(self, positions: np.ndarray, n: int, width: int, low: np.ndarray, high: np.ndarray) -> int:
        """Write (k,) int64 positions into low and high, uint64 words that need no clearing. Returns the good ones."""
        ...

    def elias_fano_decode(self, low: np.ndarray, high: np.ndarray, n: int, width: int, positions: np.ndarray) -> int:
        """Fill (k,) int64 positions. Returns the good ones, k + 1 when the words hold more than k."""
        ...

    def bitmap_encode(self, positions: np.ndarray, n: int, words: np.ndarray) -> int:
        """Write (k,) int64 positions into uint64 words that need no clearing. Returns the good ones."""
        ...

    def bitmap_decode(self, words: np.ndarray, n: int, positions: np.ndarray) -> int:
        """Fill (k,) int64 positions. Returns the good ones, k + 1 when the words hold more than k."""
        ...


@lru_cache(maxsize=1)
def bit_kernels() -> BitKernels:
    """Return the bit loops. Numba is imported on the first call, not with the package.

    Raises:
        ConfigError: Numba does not work here; the message says why.
    """
    try:
        from dgc.core.wire.codecs import numba_loops

        words, one = np.zeros(1, np.uint64), np.zeros(1, np.int64)
        numba_loops.bitmap_encode(one, 1, words)
        if numba_loops.bitmap_decode(words, 1, one) == 1 and sys.byteorder == "little":
            return numba_loops
        reason = "they read words in another order than this machine's"
    except Exception as error:  # whatever is wrong with a compiler
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f'indices="elias_fano" and "bitmap" need Numba, whose loops do not work here ({reason}); mend it (pip install '
        'numba), or choose indices="uint16"'
    )


@lru_cache(maxsize=1)
def default_loops() -> ModuleType | None:
    """Return the Numba loops of the default codecs, None where they do not work; NumPy then writes the same bytes.

    The first call compiles them, or loads them from the cache.
    """
    if sys.byteorder != "little":
        return None
    try:
        from dgc.core.wire.codecs import numba_loops as loops

        values, halves = np.full(1, 1.5, np.float32), np.empty(1, np.uint16)
        loops.to_halves(values, np.float32(2), halves)
        loops.from_halves(halves, np.float32(0.5), values)
        loops.to_tiles(np.zeros(1, np.int64), np.empty(1, np.uint32), halves)
        used = loops.encode_message(np.zeros(1, np.int64), values, 1, np.empty(32, np.uint8), values.copy())
        block, one = np.empty(16, np.uint8), np.zeros(1, np.int64)
        loops.encode_int8(values, one, np.arange(2), block, values.copy())
        loops.add_int8(block, one, np.arange(2), values.copy())
        if used == 32 and values[0] == 1.5 and loops.largest_magnitude(values) == 0x3FC00000:
            return loops
    except ImportError:
        pass
    except Exception:
        logger.warning("Numba's loops of the default codecs do not work here; they use NumPy", exc_info=True)
    return None
