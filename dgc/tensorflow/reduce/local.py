"""Variables whose gradients stay on their rank, beside those that are exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.engine.numpy_bridge import APPLY
from dgc.tensorflow.engine.tensors import raw_variable


class LocalVariables:
    """The variables that a script has registered as local with one tape or optimizer."""

    def __init__(self, scale: bool = True) -> None:
        """Begin with none.

        Args:
            scale: divide their gradients by the number of ranks, as those of an average are.
        """
        self._known: set[int] = set()
        self._scale = scale

    def add(self, variable: Any) -> None:
        """Leave this variable's gradient on its rank."""
        self._known.add(id(raw_variable(variable)))

    def shared(self, variables: Sequence[Any]) -> list[int]:
        """Places of the variables whose gradients are exchanged."""
        return [i for i, v in enumerate(variables) if id(raw_variable(v)) not in self._known]

    def without(self, variables: Iterable[Any]) -> list[Any]:
        """The variables whose gradients are exchanged."""
        every = list(variables)
        return [every[i] for i in self.shared(every)]

    def reduce(
        self, reducer: Any, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any = None, **options: Any
    ) -> tuple[list[Any], tf.Tensor]:
        """:meth:`dgc.tensorflow.reduce.reducer.Reducer.reduce` for the others; these keep their own gradients.

        Raises:
            ConfigError: passes are added up, or the compressor applies a momentum, which would not act on them.
        """
        places = self.shared(variables)
        if len(places) == len(variables):
            return reducer.reduce(list(gradients), list(variables), optimizer, **options)  # type: ignore[no-any-return]
        if reducer.passes > 1:
            raise ConfigError(
                "backward_passes_per_step > 1 (gradient accumulation) does not add up the gradients of local "
                "variables; use 1, or another optimizer for them"
            )
        shared = [gradients[i] for i in places], [variables[i] for i in places]
        # Before anything is exchanged: an eager step could not be taken back.
        reducer.stand_beside_local(shared[1], optimizer)
        reduced, verdict = [], tf.constant(APPLY, tf.int32)
        if places:
            if "dense_for" in options:
                options["dense_for"] = options["dense_for"] or "some variables are local"
            reduced, verdict = reducer.reduce(*shared, optimizer, **options)
        results = list(gradients)
        for place, gradient in zip(places, reduced, strict=True):
            results[place] = gradient
        for place in sorted(set(range(len(variables))) - set(places)):
            own = _divided(results[place], reducer.size) if self._scale else results[place]
            results[place] = after([verdict], own)
        return results, verdict


def after(others: Sequence[tf.Tensor], gradient: Any) -> Any:
    """A gradient that a graph hands over when ``others`` are there: not in a step in which they are refused."""
    if gradient is None or not others or tf.executing_eagerly():
        return gradient
    with tf.control_dependencies(list(others)):
        return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def _divided(gradient: Any, size: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / tf.cast(size, gradient.dtype)
