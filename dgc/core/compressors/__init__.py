"""The compressors: one file and one row in :mod:`~dgc.core.compressors.registry` each."""

from dgc.core.compressors.base import Algorithm, Entries, Moment, PerTensor, Room, Tensor, Whole
from dgc.core.compressors.registry import compressor_class, compressor_names, register

__all__ = [
    "Algorithm",
    "Entries",
    "Moment",
    "PerTensor",
    "Room",
    "Tensor",
    "Whole",
    "compressor_class",
    "compressor_names",
    "register",
]
