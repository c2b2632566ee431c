"""The one way from TensorFlow into the core and back: eager by views, in a graph through one NumPy operation.

In: ``tf.numpy_function`` shows Python the tensors' own memory. Out: TensorFlow takes over NumPy arrays that are aligned
for its kernels (:class:`~dgc.tensorflow.engine.tensors.ResultPool` makes such), so neither direction copies on a CPU.
From a GPU TensorFlow copies the gradients to the host and the results back, because the core's arrays live there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from dgc.errors import ConfigError
from dgc.tensorflow.engine.tensors import ALIGNMENT, Variable, raw_variable

ACCUMULATED, APPLY, REFUSED = 0, 1, 2
"""Outcomes of a step: gradients were only added up; results are to be applied; a rank met a non-finite value."""

T = TypeVar("T")


def still_there(reference: weakref.ref[T]) -> T:
    """The object behind a weak reference, which is all that a graph may hold: TensorFlow keeps graphs for ever.

    Raises:
        ConfigError: the graph has outlived it.
    """
    held = reference()
    if held is None:
        raise ConfigError(
            "the compressor that this graph was built with is gone: nothing refers to it any more, nor to the "
            "variables it was bound to; keep it as long as the function is called"
        )
    return held


def verdict_of(gradients: Sequence[Any]) -> tf.Tensor:
    """REFUSED for dense or sparse gradients with a value that is not finite; else APPLY."""
    values = [getattr(g, "values", g) for g in gradients if g is not None]
    if not values:
        return tf.constant(APPLY, tf.int32)
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
    return tf.where(finite, tf.constant(APPLY, tf.int32), tf.constant(REFUSED, tf.int32))


def warn_of_copies(variables: Sequence[Variable]) -> None:
    """Say once in a process that gradients on a device other than the CPU are copied to the host in every step."""
    specs = [tf.DeviceSpec.from_string(raw_variable(v).device or "") for v in variables]
    devices = sorted({f"{s.device_type}:{s.device_index}" for s in specs if s.device_type not in (None, "CPU")})
    if devices:
        _warn_of(", ".join(devices))


@cache
def _warn_of(devices: str) -> None:
    warnings.warn(
        f"gradients pass through host memory: TensorFlow copies them there from {devices}, and results back, in every "
        "step; PyTorch's dgc and topk work on the GPU",
        RuntimeWarning,
        stacklevel=4,
    )


Step = Callable[[list[np.ndarray], "float | None", list[np.ndarray]], "tuple[list[np.ndarray], int]"]


def cross(
    step: Step,
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor | float | None,
    parameters: Sequence[Variable] = (),
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Hand gradients to Python and take results back, now or whenever the graph being built runs.

    Args:
        step: (gradients, learning rate, parameters) -> results in the gradients' shapes, and what became of the step.
        gradients: dense tensors.
        learning_rate: a scalar, or None.
        parameters: variables whose values the step needs, or nothing.

    Returns:
        Results of the gradients' types and shapes, and an int32 scalar: ACCUMULATED, APPLY or REFUSED.

    Raises:
        ConfigError: inside an XLA-compiled function.
        DGCError: eager only; in a graph TensorFlow raises one of its own errors with the same text.
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
            "XLA cannot compile the exchange of gradients (Horovod's neither): pass jit_compile=False to compile() or "
            "tf.function"
        )

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        results, verdict = call(arrays)
        return [*results, np.int32(verdict)]  # type: ignore[list-item]

    types = [tf.float64 if g.dtype == tf.float64 else tf.float32 for g in gradients]
    *outputs, verdict = tf.numpy_function(run, inputs, [*types, tf.int32], name="dgc_exchange")
    verdict.set_shape(())
    return [_like(o, g) for o, g in zip(outputs, gradients, strict=True)], verdict


def _as_tensor(array: np.ndarray) -> tf.Tensor:
    """The array as an eager tensor that shares its memory and keeps it alive, or of a copy where it is not aligned."""
    if array.size == 0 or not array.flags.writeable or array.ctypes.data % ALIGNMENT:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _like(output: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    if not isinstance(output, tf.Tensor) or not tf.executing_eagerly():
        output.set_shape(gradient.shape)
    return output if output.dtype == gradient.dtype else tf.cast(output, gradient.dtype)
