"""One step's gradients of this rank in, reduced gradients out: for the tape and all optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.engine.numpy_bridge import APPLY
from dgc.tensorflow.engine.tensors import Variable
from dgc.tensorflow.reduce.context import Context, Gradient


@tf.autograph.experimental.do_not_convert
def reduce(
    gradients: Sequence[Gradient], variables: Sequence[Variable], context: Context
) -> tuple[list[Gradient], tf.Tensor]:
    """Exchange one step's gradients, now or in the graph being built.

    Args:
        gradients: one per variable; None where the loss does not depend on it.
        variables: the same ones, in the same order, in every step.
        context: who reduces them, and how.

    Returns:
        The reduced gradients, and an int32 scalar: ACCUMULATED, APPLY, REFUSED or ENTRIES (see
        :mod:`dgc.tensorflow.engine.numpy_bridge`).

    Raises:
        ConfigError: the gradients are results of an exchange, or passes are added up beside local variables, or the
            compressor applies a momentum, which would not act on those.
        DGCError: ranks or steps differ, or a rank failed.
    """
    reducer, local = context.reducer, context.local
    gradients, variables = list(gradients), list(variables)
    if context.loss_scale is not None:
        gradients = scaled(gradients, 1.0 / context.loss_scale)
    if reducer.options.sparse_as_dense:
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    places = local.shared(variables)
    if len(places) == len(variables):
        return reducer.reduce(gradients, variables, context)
    if reducer.options.passes > 1:
        raise ConfigError(
            "backward_passes_per_step > 1 (gradient accumulation) does not add up the gradients of local variables; "
            "use 1, or another optimizer for them"
        )
    shared = [gradients[i] for i in places], [variables[i] for i in places]
    if (compression := reducer.compression) is not None:
        # Before anything is exchanged: an eager step could not be taken back.
        if places:
            compression.bind(shared[1], context.optimizer, reducer.options.process_set)
        compression.stand_beside_local()
    reduced: list[Gradient] = []
    verdict = tf.constant(APPLY, tf.int32)
    if places:
        reason = context.dense_for or "some variables are local"
        reduced, verdict = reducer.reduce(*shared, replace(context, dense_for=reason))
    size = reducer.size if local.scale else 1
    # A graph hands local gradients over after the exchange: not in a step that it refuses with an error.
    ends = [verdict, *(getattr(g, "values", g) for g in reduced if g is not None)]
    results = dict(zip(places, reduced, strict=True))
    for i in set(range(len(variables))) - set(places):
        results[i] = _after(ends, _changed(gradients[i], lambda values: values / tf.cast(size, values.dtype)))
    return [results[i] for i in range(len(variables))], verdict


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor | float) -> list[Gradient]:
    """Gradients times a factor, which is cast to their types."""
    return [_changed(g, lambda values: values * tf.cast(factor, values.dtype)) for g in gradients]


def _changed(gradient: Gradient, change: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


def _after(others: Sequence[tf.Tensor], gradient: Gradient) -> Gradient:
    if gradient is None or tf.executing_eagerly():
        return gradient
    with tf.control_dependencies(list(others)):
        return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
