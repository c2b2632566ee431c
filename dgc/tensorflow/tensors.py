"""TensorFlow's tensors and variables as NumPy arrays, and the path of gradients from TensorFlow to the core and back.

Eager code uses views of tensors. A graph calls one ``tf.numpy_function``, which also gives Python views. TensorFlow
uses NumPy arrays without a copy if they are aligned for its kernels (:class:`ResultPool` makes such arrays). So neither
direction copies on a CPU. With a GPU, TensorFlow copies the gradients to the host for the core, and the results back.
"""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from dgc.adapter.agreement import gather_if_different, sample_places
from dgc.adapter.checks import warn_once
from dgc.core.collectives import Transport
from dgc.core.layout import Parameter
from dgc.errors import ConfigError, LayoutError

Variable: TypeAlias = tf.Variable  # or a variable of Keras 3, which holds a tf.Variable

ALIGNMENT = 64  # bytes; TensorFlow copies NumPy memory that is not aligned for its kernels


def raw_variable(variable: Variable) -> tf.Variable:
    """Return the ``tf.Variable`` inside a Keras 3 variable, or the variable itself."""
    # Under mixed precision `.value` of a Keras variable may be a cast copy; `_value` is the variable.
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def unique_names(variables: Sequence[Variable]) -> list[str]:
    """Return a name for each variable. Number the variables of one name, which plain ``tf.Variable``s may share."""
    names, seen = [], dict[str, int]()
    for variable in variables:
        name = (getattr(variable, "path", None) or variable.name).removesuffix(":0")
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def describe(name: str, variable: Variable) -> Parameter:
    """Return the core's description of a variable."""
    raw = raw_variable(variable)
    if isinstance(raw, tf.distribute.DistributedValues):
        raise LayoutError(
            f"variable {name!r} belongs to a strategy of tf.distribute (MirroredStrategy, ...), which makes replicas "
            "itself; here Horovod's ranks are the replicas: start one process for each device, without a strategy"
        )
    if not raw.shape.is_fully_defined():
        raise LayoutError(f"variable {name!r} has the shape {raw.shape}; a compressed variable needs a fixed one")
    return Parameter(name, tuple(int(d) for d in raw.shape), raw.dtype.name)


def as_array(value: object) -> np.ndarray:
    """Return the values as (n,), bfloat16 as float32: a view of an array or CPU tensor, a copy of a GPU tensor."""
    array = np.asarray(value)
    if array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).reshape(-1)


def samples(variable: Variable) -> np.ndarray:
    """Return at most 8 values of a variable, as float64, to compare the variable between ranks."""
    with tf.init_scope():  # the ranks also compare while a graph is being traced
        values = as_array(raw_variable(variable))
    return values[sample_places(values.size)].astype(np.float64)


def largest_finite(dtype: tf.DType) -> float | None:
    """Return the largest finite value of a type narrower than float32; None for other types."""
    return float(dtype.max) if dtype in (tf.float16, tf.bfloat16) else None


class ResultPool:
    """Arrays that TensorFlow uses as tensors without a copy. They are used again once TensorFlow has dropped them.

    Allocating 100 MB takes as long as copying it, because of page faults.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> None:
        self._shapes = list(shapes)
        self._dtypes = [np.dtype(d) for d in dtypes]
        self._blocks: list[list[np.ndarray]] = [[] for _ in self._shapes]

    def take(self, index: int) -> np.ndarray:
        """Return an array of the shape of result ``index``; nothing else refers to this array."""
        blocks = self._blocks[index]
        for place in range(len(blocks)):
            # The two references are the list's and getrefcount's argument. Any view would be a third one.
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
    """Return rank 0's names if the ranks' names differ only in Keras' counters and leading parts. Collective.

    Otherwise return this rank's names.
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
    # Compare the variable's own name and, if both names have one, the layer's name.
    return a[-shorter:] == b[-shorter:] and (shorter > 1 or len(a) == len(b))


# Outcomes of a step: gradients were only added up; results are to be applied; a rank met a non-finite value.
ACCUMULATED, APPLY, REFUSED = 0, 1, 2

T = TypeVar("T")


def still_there(reference: weakref.ref[T]) -> T:
    """Return the object of a weak reference. Graphs hold only such references, because TensorFlow keeps graphs."""
    held = reference()
    if held is None:
        raise ConfigError(
            "the compressor that this graph was built with is gone, because nothing refers to it or to its variables "
            "any more; keep it as long as the function is called"
        )
    return held


def verdict_of(gradients: Sequence[Any]) -> tf.Tensor:
    """Return REFUSED if a dense or sparse gradient has a value that is not finite; else APPLY."""
    values = [getattr(g, "values", g) for g in gradients if g is not None]
    if not values:
        return tf.constant(APPLY, tf.int32)
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
    return tf.where(finite, tf.constant(APPLY, tf.int32), tf.constant(REFUSED, tf.int32))


def warn_of_copies(variables: Sequence[Variable]) -> None:
    """Warn once in a process if gradients are on a GPU and so are copied to the host in every step."""
    specs = [tf.DeviceSpec.from_string(raw_variable(v).device or "") for v in variables]
    devices = sorted({f"{s.device_type}:{s.device_index}" for s in specs if s.device_type not in (None, "CPU")})
    if devices:
        warn_once(
            f"gradients pass through host memory: TensorFlow copies them there from {', '.join(devices)}, and results "
            "back, in every step; PyTorch's dgc and topk work on the GPU"
        )


# (gradients, learning rate, parameters) -> results in the gradients' shapes, and ACCUMULATED, APPLY or REFUSED.
Step = Callable[[list[np.ndarray], "float | None", list[np.ndarray]], "tuple[list[np.ndarray], int]"]


def cross(
    step: Step,
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor | float | None,
    parameters: Sequence[Variable] = (),
    before_changes_of: Sequence[Variable] = (),
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Call ``step`` with dense gradients, now or whenever the graph being built runs.

    Args:
        step: the Python function.
        gradients: the gradients for the step.
        learning_rate: the learning rate for the step.
        parameters: variables whose values the step needs.
        before_changes_of: variables that the graph may change, for instance by weight decay, only after the step.

    Returns:
        Results of the gradients' types and shapes, and the verdict, an int32 scalar.
    """
    rate = [] if learning_rate is None else [tf.cast(tf.convert_to_tensor(learning_rate), tf.float32)]
    values = [tf.convert_to_tensor(raw_variable(p)) for p in parameters]
    count = len(gradients)

    def call(arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        given = float(arrays[count]) if rate else None
        return step(list(arrays[:count]), given, list(arrays[count + len(rate) :]))

    inputs = [*gradients, *rate, *values]
    if tf.executing_eagerly():
        arrays, verdict = call([np.asarray(t) for t in inputs])
        return [_like(_as_tensor(a), g) for a, g in zip(arrays, gradients, strict=True)], tf.constant(verdict, tf.int32)
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "XLA cannot compile the exchange of gradients, nor Horovod's: pass jit_compile=False to compile() or "
            "tf.function"
        )

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        results, verdict = call(arrays)
        return [*results, np.int32(verdict)]  # type: ignore[list-item]

    types = [tf.float64 if g.dtype == tf.float64 else tf.float32 for g in gradients]
    *outputs, verdict = tf.numpy_function(run, inputs, [*types, tf.int32], name="dgc_exchange")
    verdict.set_shape(())
    with tf.control_dependencies([verdict]):
        for variable in before_changes_of:
            raw_variable(variable).read_value()  # TensorFlow makes assignments wait for earlier reads
    return [_like(o, g) for o, g in zip(outputs, gradients, strict=True)], verdict


def _as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return an eager tensor that shares the array's memory and keeps it alive; copy an array that is not aligned."""
    if array.size == 0 or not array.flags.writeable or array.ctypes.data % ALIGNMENT:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _like(output: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    if not isinstance(output, tf.Tensor) or not tf.executing_eagerly():
        output.set_shape(gradient.shape)
    return output if output.dtype == gradient.dtype else tf.cast(output, gradient.dtype)
