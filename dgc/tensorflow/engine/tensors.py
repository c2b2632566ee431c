"""TensorFlow's tensors and variables as the core sees them: flat NumPy views where the memory allows it.

n = elements of a tensor.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import tensorflow as tf

from dgc.core.layout import Parameter
from dgc.core.transport import Transport
from dgc.errors import LayoutError
from dgc.transport.agreement import gather_if_different, sample_places

Variable: TypeAlias = tf.Variable
"""A variable of TensorFlow, or one of Keras 3 around it."""

ALIGNMENT = 64
"""Bytes. TensorFlow takes over NumPy memory without a copy only where its own kernels could work on it."""


def raw_variable(variable: Variable) -> tf.Variable:
    """The ``tf.Variable`` inside a Keras 3 variable, or the variable itself."""
    # `.value` of a Keras variable may be a cast copy under mixed precision; `_value` is the variable.
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def unique_names(variables: Sequence[Variable]) -> list[str]:
    """A name for each variable; where several share one (plain ``tf.Variable``s), their order tells them apart."""
    names, seen = [], dict[str, int]()
    for variable in variables:
        name = (getattr(variable, "path", None) or variable.name).removesuffix(":0")
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def describe(name: str, variable: Variable) -> Parameter:
    """A variable as the core lists it.

    Raises:
        LayoutError: a dimension is open, or the variable belongs to a strategy of ``tf.distribute``.
    """
    raw = raw_variable(variable)
    if isinstance(raw, tf.distribute.DistributedValues):
        raise LayoutError(
            f"variable {name!r} belongs to a strategy of tf.distribute (MirroredStrategy, ...), which has replicas of "
            "its own; Horovod's ranks are the replicas here: start one process for each device, without a strategy"
        )
    if not raw.shape.is_fully_defined():
        raise LayoutError(f"variable {name!r} has the shape {raw.shape}; a compressed variable needs a fixed one")
    return Parameter(name, tuple(int(d) for d in raw.shape), raw.dtype.name)


def as_array(value: object) -> np.ndarray:
    """The values as (n,): a view of an eager CPU tensor or of an array, a copy from a GPU, float32 for bfloat16."""
    array = np.asarray(value)
    if array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).reshape(-1)


def samples(variable: Variable) -> np.ndarray:
    """(at most 8,) float64: a few values of a variable, to compare it between ranks."""
    with tf.init_scope():  # errors are raised while a graph is traced, too
        values = as_array(raw_variable(variable))
    return values[sample_places(values.size)].astype(np.float64)


def largest_finite(dtype: tf.DType) -> float | None:
    """The largest finite value of a type narrower than float32; None for the others."""
    return float(dtype.max) if dtype in (tf.float16, tf.bfloat16) else None


class ResultPool:
    """Arrays that are handed to TensorFlow as tensors without a copy, and used again once it has let go of them.

    Fresh memory of 100 MB costs as much as copying it, in page faults.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> None:
        """Remember what to make.

        Args:
            shapes: of each result.
            dtypes: NumPy type of each result.
        """
        self._shapes = list(shapes)
        self._dtypes = [np.dtype(d) for d in dtypes]
        self._blocks: list[list[np.ndarray]] = [[] for _ in self._shapes]

    def dtype(self, index: int) -> np.dtype:
        """Of result ``index``."""
        return self._dtypes[index]

    def take(self, index: int) -> np.ndarray:
        """An array of result ``index``'s shape without other references."""
        blocks = self._blocks[index]
        for place in range(len(blocks)):
            # The list's own reference and getrefcount's argument; a view, ours or TensorFlow's, would be a third.
            if sys.getrefcount(blocks[place]) == 2:
                return self._view(blocks[place], index)
        numel = int(np.prod(self._shapes[index], dtype=np.int64))
        blocks.append(np.empty(numel * self._dtypes[index].itemsize + ALIGNMENT, np.uint8))
        return self._view(blocks[-1], index)

    def _view(self, block: np.ndarray, index: int) -> np.ndarray:
        start = -block.ctypes.data % ALIGNMENT
        return block[start : start + block.size - ALIGNMENT].view(self._dtypes[index]).reshape(self._shapes[index])


_COUNTED = re.compile(r"_[0-9]+(?=/|$|#)")


def common_names(transport: Transport, names: Sequence[str]) -> list[str]:
    """Rank 0's names where they differ from this rank's by Keras' counting and by leading parts only. Collective.

    Returns:
        This rank's own names where any rank has another number of variables or other names.

    Raises:
        TransportError: Horovod's collective failed.
    """
    gathered = gather_if_different(transport, {"names": list(names)})
    if gathered is None:
        return list(names)
    lists = [json.loads(entry["names"]) for entry in gathered]
    first = lists[0]
    alike = all(len(own) == len(first) and all(map(_alike, own, first)) for own in lists)
    return first if alike else list(names)


def _alike(one: str, other: str) -> bool:
    a, b = (_COUNTED.sub("", name).split("/") for name in (one, other))
    shorter = min(len(a), len(b))
    # The variable's own name and its layer's, where there is one.
    return a[-shorter:] == b[-shorter:] and (shorter > 1 or len(a) == len(b))
