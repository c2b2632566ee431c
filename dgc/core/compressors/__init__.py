"""The compressors: one file and one row in :mod:`~dgc.core.compressors.registry` each."""

from dgc.core.compressors.base import Algorithm, BucketSpec, DenseValues, PerTensor, SparseValues, StepInfo, Tensor
from dgc.core.compressors.registry import compressor_class, compressor_names, register

__all__ = [
    "Algorithm",
    "BucketSpec",
    "DenseValues",
    "PerTensor",
    "SparseValues",
    "StepInfo",
    "Tensor",
    "compressor_class",
    "compressor_names",
    "register",
]
