"""Chooses the implementation of the bit loops: Numba where it is installed, NumPy otherwise. Same bytes either way."""

from __future__ import annotations

import sys
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import numpy as np


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
    """Return the fastest kernels that work here. Numba is imported on the first call, not with the package."""
    if sys.byteorder == "little":  # the Numba loops read words in the machine's order
        try:
            from dgc.core.wire import bits_numba

            return bits_numba
        except ImportError:
            pass
    from dgc.core.wire import bits_numpy

    return bits_numpy


@lru_cache(maxsize=1)
def default_loops() -> ModuleType | None:
    """Return the Numba loops of the default codecs, None where they do not work; NumPy then writes the same bytes."""
    if sys.byteorder != "little":
        return None
    try:
        from dgc.core.wire import halves_numba
    except ImportError:
        return None
    return halves_numba
