"""Updates of the entries that came alone, without a dense result and without the optimizer's pass over the variables.

Where the optimizer is Keras' SGD whose momentum the compressor applies, all that is left of its step is
``v <- v - lr * result``. The result is 0 nearly everywhere, and ``v - lr * 0`` is ``v``. The entries that are not 0 go
through the operations that SGD calls, in the same order: the variables are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dgc.tensorflow.engine.numpy_bridge import ENTRIES, Entries
from dgc.tensorflow.engine.optimizers import (
    LEGACY_V2,
    Optimizer,
    clipping,
    family,
    get_momentum,
    is_plain_update,
    learning_rate,
    own_update,
)
from dgc.tensorflow.engine.tensors import Variable, raw_variable
from dgc.tensorflow.reduce.step import Gradient

_OPTIONS = ("weight_decay", "loss_scale_factor", "gradient_accumulation_steps")
_FLAGS = ("use_ema", "jit_compile", "_mesh")


def obstacle_of_sgd(optimizer: Optimizer, variables: Sequence[Variable]) -> str | None:
    """Give the reason why a Keras optimizer's own pass over the variables is needed; None if it is not.

    Options that are assigned after a graph was traced do not reach that graph, with dense results neither.
    """
    given = next(c for c in type(optimizer).__mro__ if not c.__module__.startswith("dgc."))
    kind = family(optimizer)
    if given.__name__ != "SGD" or not given.__module__.startswith(("keras.src.", "tf_keras.src.")):
        return f"the optimizer is {given.__name__}, not Keras' SGD"
    if kind == LEGACY_V2:
        return "tf_keras.optimizers.legacy.SGD updates whole variables in one operation"
    if get_momentum(optimizer)[0]:
        return "the optimizer applies momentum itself"
    if clips := clipping(optimizer):
        return f"the optimizer has {clips}"
    for name in _OPTIONS:
        if getattr(optimizer, name, None) is not None:
            return f"the optimizer has {name}={getattr(optimizer, name)!r}"
    for name in _FLAGS:
        if getattr(optimizer, name, None):
            return f"the optimizer has {name.lstrip('_')}"
    if not is_plain_update(optimizer) or own_update(optimizer) or "assign_sub" in vars(optimizer):
        return "a method of the optimizer was replaced"
    rate = optimizer._learning_rate
    if callable(rate) and not isinstance(rate, tf.Variable) and not hasattr(rate, "get_config"):
        return "the learning rate is a function"
    if tf.distribute.has_strategy():
        return "a strategy of tf.distribute is in use"
    return next(filter(None, map(_obstacle_of, variables)), None)


def can_scatter(variable: Variable) -> bool:
    """Whether entries of a variable can be changed where they are."""
    raw = raw_variable(variable)
    on_cpu = tf.DeviceSpec.from_string(raw.device).device_type in (None, "CPU")
    return on_cpu and raw.dtype in (tf.float32, tf.float64) and 0 < raw.shape.rank <= _MOST_DIMENSIONS


_MOST_DIMENSIONS = 7
"""That TensorFlow's scatter operations take."""


def update(
    optimizer: Optimizer,
    reduced: Sequence[Gradient],
    variables: Sequence[Variable],
    verdict: tf.Tensor,
    apply: Callable[[list[Any], list[Any]], Any],
    count: Callable[[], Any],
) -> None:
    """Apply what :func:`dgc.tensorflow.reduce.step.reduce` has returned, entries without the optimizer.

    Args:
        optimizer: whose learning rate counts.
        reduced: results.
        variables: in the same order.
        verdict: of the step.
        apply: the optimizer's update: (gradients, variables).
        count: what the optimizer does in a step beside updating variables.
    """
    alone = {i: result for i, result in enumerate(reduced) if isinstance(result, Entries)}
    if not alone:
        apply(list(reduced), list(variables))
        return
    others = [i for i in range(len(reduced)) if i not in alone]

    def sparse() -> int:
        rate = learning_rate(optimizer)
        for i, entries in alone.items():
            _update(raw_variable(variables[i]), entries, rate)
        if all(reduced[i] is None for i in others):
            count()
        else:
            apply([reduced[i] for i in others], [variables[i] for i in others])
        return 0

    def dense() -> int:
        # TensorFlow wants all of them to be of this branch's graph.
        results = [None if result is None or i in alone else tf.identity(result) for i, result in enumerate(reduced)]
        for i, entries in alone.items():
            results[i] = tf.ensure_shape(entries.dense, raw_variable(variables[i]).shape)
        apply(results, list(variables))
        return 0

    tf.cond(tf.equal(verdict, ENTRIES), sparse, dense)


def _update(variable: tf.Variable, entries: Entries, rate: tf.Tensor | float) -> None:
    # Keras 3 subtracts result * rate, legacy Keras adds -result * rate: the same number either way.
    handle, places = variable.handle, entries.places
    # Gathered first: the scatter alone would wait for the memory of one entry after the other.
    before = tf.raw_ops.ResourceGatherNd(resource=handle, indices=places, dtype=variable.dtype)
    after = before - entries.values * tf.cast(tf.convert_to_tensor(rate), variable.dtype)
    tf.raw_ops.ResourceScatterNdUpdate(ref=handle, indices=places, updates=after)
    # A scatter makes every later read of the variable a copy, because another scatter would change what was read. It
    # makes its own copy first where somebody holds the memory, so reads need none.
    tf.raw_ops.DisableCopyOnRead(resource=handle)


def _obstacle_of(variable: Variable) -> str | None:
    if getattr(variable, "constraint", None) is not None or getattr(variable, "overwrite_with_gradient", False):
        return f"{raw_variable(variable).name!r} has a constraint"
    return None
