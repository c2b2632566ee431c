"""The distributed optimizers for legacy Keras (``tf_keras``): the user's optimizer gets a derived class.

Legacy Keras and its LossScaleOptimizer call ``aggregate_gradients`` before they look at the gradients' values, so
``aggregate_gradients`` exchanges them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras

from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Optimizer, without_loss_scale
from dgc.tensorflow.compressor import require_classic
from dgc.tensorflow.reduce import Gradient, HasReducer, Reducer
from dgc.tensorflow.tensors import ACCUMULATED, Variable


def wrap_legacy(optimizer: Optimizer, reducer: Reducer, name: str | None) -> Any:
    """Make ``optimizer`` distributed, in place."""
    inner = without_loss_scale(optimizer)
    if inner is not optimizer and reducer.passes > 1:
        raise ConfigError("backward_passes_per_step > 1 does not work with legacy Keras' LossScaleOptimizer; use 1")
    if reducer.compression is not None:
        require_classic(reducer.compression.config, "legacy Keras' optimizer")
    reducer.adopt(inner)
    if not isinstance(inner, Distributed):
        inner.__class__ = _distributed_class(type(inner))  # type: ignore[arg-type]
    inner.use_reducer(reducer)
    return optimizer


_Base: Any = object


class Distributed(HasReducer, _Base):
    """A mixin for the class of the user's optimizer."""

    @tf.autograph.experimental.do_not_convert
    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Variable]]
    ) -> list[tuple[Gradient, Variable]]:
        """Exchange this rank's gradients."""
        return self._exchange(grads_and_vars)[0]

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *args: Any, **options: Any) -> Any:
        """Exchange the gradients and apply them. With ``backward_passes_per_step=N`` do so in every N-th call."""
        already = options.get("skip_gradients_aggregation") or not options.get("experimental_aggregate_gradients", True)
        if already or self._dgc_reducer.passes == 1:
            return super().apply_gradients(grads_and_vars, *args, **options)  # this calls aggregate_gradients()
        grads_and_vars = list(grads_and_vars)
        apply = functools.partial(super().apply_gradients, **{**options, "skip_gradients_aggregation": True})
        reduced, verdict = self._exchange(grads_and_vars)
        with tf.init_scope():
            self.build([v for _, v in grads_and_vars])

        def update() -> tf.Tensor:
            apply(reduced, *args)
            return tf.convert_to_tensor(self.iterations)

        def count() -> tf.Tensor:
            self.iterations.assign_add(1)
            return tf.convert_to_tensor(self.iterations)

        return tf.cond(tf.equal(verdict, ACCUMULATED), count, update)

    def _exchange(
        self, grads_and_vars: Iterable[tuple[Gradient, Variable]]
    ) -> tuple[list[tuple[Gradient, Variable]], tf.Tensor]:
        grads, variables = zip(*list(grads_and_vars), strict=True)
        reduced, verdict = self._dgc_reducer.reduce(grads, variables, self)
        return list(zip(reduced, variables, strict=True)), verdict

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the user's optimizer, with the user's momentum, and our settings."""
        config = super().get_config()
        adoption = self._dgc_reducer.adoption
        inner = config if adoption is None else adoption.config(config)
        return {"inner": inner, "settings": self._dgc_reducer.to_config(), "is_legacy_optimizer": False}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Mapping[str, object] | None = None) -> Any:
        """Build the saved optimizer. The compressor begins with empty residuals."""
        base: Any = cls.__bases__[-1]
        inner = dict(config["inner"])
        inner.pop("is_legacy_optimizer", None)
        return wrap_legacy(base.from_config(inner), Reducer.from_config(config["settings"]), None)


@functools.cache
def _distributed_class(base: type) -> type:
    """Derive a class from an optimizer's class, and register its name so that Keras can load it."""
    derived = type(f"Distributed{base.__name__}", (Distributed, base), {"__module__": __name__})
    return tf_keras.saving.register_keras_serializable(package="dgc")(derived)


# A script may load a model before it wraps any optimizer, so Keras must know the names from the beginning.
for _name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"):
    _distributed_class(getattr(tf_keras.optimizers, _name))
