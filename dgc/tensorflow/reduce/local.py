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
        reduced, verdict = [], tf.constant(APPLY, tf.int32)
        if places:
            if "dense_for" in options:
                options["dense_for"] = options["dense_for"] or "some variables are local"
            shared = [gradients[i] for i in places], [variables[i] for i in places]
            reduced, verdict = reducer.reduce(*shared, optimizer, **options)
        engine = None if reducer.compression is None else reducer.compression.engine
        if engine is not None:
            try:
                engine.adoption.stand_beside_local()
            except ConfigError as error:
                engine.fail(error)
        results = list(gradients)
        for place, gradient in zip(places, reduced, strict=True):
            results[place] = gradient
        if self._scale:
            for place in set(range(len(variables))) - set(places):
                results[place] = _divided(results[place], reducer.size)
        return results, verdict


def _divided(gradient: Any, size: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / tf.cast(size, gradient.dtype)
