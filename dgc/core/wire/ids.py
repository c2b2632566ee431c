"""Numbers that stand for a codec in a message header. They are part of the format: never reuse or change one."""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class IndexCodecId(IntEnum):
    """How a message writes its positions. A member's lower-case name is the codec's public name."""

    NONE = 0
    """No positions: the compressor sends every element. There is no codec object for it."""
    INT32 = 1
    UINT16 = 2
    ELIAS_FANO = 3
    BITMAP = 4


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
