"""What a codec is, and the numbers that stand for one in a message header.

The numbers are part of the format: never reuse or change one. n = elements of the bucket's flat sparse space, k =
entries of one message.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Protocol, runtime_checkable

import numpy as np


@unique
class IndexCodecId(IntEnum):
    """How a message writes its positions. A member's lower-case name is the codec's public name."""

    NONE = 0
    """No positions: the compressor sends every element. There is no codec object for it."""
    INT32 = 1
    UINT16 = 2
    ELIAS_FANO = 3
    # 4 is reserved: it was a codec's.


@unique
class ValueCodecId(IntEnum):
    """How a message writes its values. A member's lower-case name is the codec's public name."""

    NONE = 0
    """The compressor writes its payload itself. There is no codec object for it."""
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT8 = 4
    SIGN = 5
    FLOAT64 = 6
    INT2 = 7
    INT3 = 8


@runtime_checkable
class IndexCodec(Protocol):
    """Writes k sorted, unique positions below n as bytes and reads them back."""

    @property
    def id(self) -> int:
        """The codec's number in a header."""
        ...

    @property
    def name(self) -> str:
        """The codec's name in the option ``indices=``."""
        ...

    def max_bytes(self, n: int, k: int) -> int:
        """Bytes that suffice for k or fewer entries, whatever the positions: a multiple of 8 that never falls with k.

        Raises:
            ConfigError: this codec cannot address n elements, or k is not within 0..n.
        """
        ...

    def encode(self, positions: np.ndarray, n: int, out: np.ndarray) -> int:
        """Write (k,) int64 positions, strictly ascending in [0, n), at the start of ``out``.

        For unsorted positions a codec may write nonsense, which ``decode`` refuses, but never outside ``out``.

        Args:
            positions: the positions.
            n: elements of the bucket.
            out: (m,) uint8, contiguous, m >= ``max_bytes(n, k)``.

        Returns:
            Bytes written, at most ``max_bytes(n, k)``, a multiple of 8.

        Raises:
            ConfigError: as ``max_bytes``.
            WireError: ``out`` is too short, or the codec met positions that it cannot write.
        """
        ...

    def decode(self, data: np.ndarray, n: int, count: int) -> tuple[np.ndarray, int]:
        """Read ``count`` positions from the start of ``data``, (m,) uint8; what follows them is not looked at.

        Returns:
            (count,) int64, strictly ascending, each in [0, n); and the number of bytes read.

        Raises:
            WireError: ``data`` is too short, or does not hold ``count`` ascending positions below n.
        """
        ...


@runtime_checkable
class ValueCodec(Protocol):
    """Writes k values as bytes and reads them back, exactly or with an error that the sender can compute.

    Group i, one per tensor of the bucket, holds the entries ``bounds[i]:bounds[i + 1]``; bounds are (groups + 1,) int64
    from 0 to k. Groups may be empty. Finite values come back finite; a non-finite value makes its own entry non-finite,
    or its whole group where the group shares a scale. Neither raises.
    """

    @property
    def id(self) -> int:
        """The codec's number in a header."""
        ...

    @property
    def name(self) -> str:
        """The codec's name in the option ``values=``."""
        ...

    @property
    def grouped(self) -> bool:
        """Whether the groups matter; where they do not, ``bounds`` may name one group of all entries."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Type of the values on both sides: float32, or float64 for the float64 codec."""
        ...

    def max_bytes(self, k: int, groups: int) -> int:
        """Bytes that always suffice for k or fewer entries in this many groups; a multiple of 8."""
        ...

    def encode(self, values: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> int:
        """Write (k,) values of ``dtype`` at the start of ``out``, (m,) uint8, m >= ``max_bytes(k, groups)``.

        Returns:
            Bytes written, at most ``max_bytes(k, groups)``, a multiple of 8.

        Raises:
            WireError: ``out`` is too short, the type is not ``dtype``, or ``bounds`` do not cover the values.
        """
        ...

    def decode(self, data: np.ndarray, count: int, bounds: np.ndarray) -> tuple[np.ndarray, int]:
        """Read ``count`` values from the start of ``data``, (m,) uint8; what follows them is not looked at.

        Returns:
            (count,) of ``dtype``, a fresh array; and the number of bytes read.

        Raises:
            WireError: ``data`` is too short or damaged, or ``bounds`` do not cover ``count`` entries.
        """
        ...
