"""The distributed optimizers for Keras 3: they hold the user's optimizer and give it reduced gradients.

Keras 3 passes this rank's gradients only to ``apply``, so ``apply`` exchanges them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Optimizer, first_moments, is_keras, make_slots
from dgc.tensorflow.reduce import Gradient, HasReducer, Reducer, scaled
from dgc.tensorflow.tensors import ACCUMULATED, APPLY, REFUSED, Variable


def load_variables(inner: Optimizer, own: Sequence[Any], store: Mapping[str, Any], momentum_is_taken: bool) -> bool:
    """Load saved variables; return False if their shapes do not fit.

    They may come from one process, from several processes, or from a dense run. If no momentum was saved, it begins at
    0. For saved momentum slots, slots are made; a compressor that has taken the momentum moves their values into u.
    """
    slots = {id(slot) for slot in _slots(inner)}
    others = [v for v in inner.variables if id(v) not in slots]
    shapes = [tuple(store[str(i)].shape) for i in range(len(store.keys()))]
    trained = [tuple(v.shape) for v in inner._trainable_variables]
    slots_may_be = is_keras(inner, "SGD") and (momentum_is_taken or bool(slots))
    for first, last in itertools.product(([*own], []), (trained, []) if slots_may_be else ([],)):
        found = [*first, *others]
        if [*(tuple(v.shape) for v in found), *last] == shapes:
            break
    else:
        return False
    if last:
        make_slots(inner)
        found += _slots(inner)
    for variable in _slots(inner):
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    for i, variable in enumerate(found):
        variable.assign(store[str(i)])
    return True


def _slots(inner: Optimizer) -> list[Any]:
    return list(getattr(inner, "momentums", None) or []) if is_keras(inner, "SGD") else []


PACKAGE = "dgc"


def wrap_keras3(optimizer: Optimizer, reducer: Reducer, name: str | None) -> Any:
    """Wrap ``optimizer`` in the distributed optimizer that fits it.

    Under the policy mixed_float16, Keras wraps every optimizer that is not a LossScaleOptimizer in one, and each rank
    would decide for itself whether to call the wrapped optimizer. So under this policy, ours is a LossScaleOptimizer.
    """
    if isinstance(optimizer, DistributedOptimizer):  # the optimizer of a loaded model that lacks options
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distributed = DistributedLossScaleOptimizer(
            optimizer.inner_optimizer,
            reducer,
            initial_scale=optimizer.initial_scale,
            dynamic_growth_steps=optimizer.dynamic_growth_steps,
            name=name,
        )
        if optimizer.built:  # as in a loaded model: keep its present loss scale
            distributed.build(optimizer.inner_optimizer._trainable_variables)
            distributed.dynamic_scale.assign(optimizer.dynamic_scale)
            distributed.step_counter.assign(optimizer.step_counter)
        return distributed
    if keras.config.dtype_policy().name == "mixed_float16":
        return DistributedLossScaleOptimizer(optimizer, reducer, name=name)
    return DistributedOptimizer(optimizer, reducer, name=name)


# Options of the user's optimizer that Keras' constructor also sets on ours.
_USERS = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "ema_momentum", "ema_overwrite_frequency")


_DECAY = keras.optimizers.Optimizer._apply_weight_decay


class _Distributed(HasReducer, keras.optimizers.Optimizer):
    """The common part of both distributed optimizers."""

    inner_optimizer: Optimizer
    built: bool
    _complete = False

    def __getattr__(self, name: str) -> Any:
        """Return an option of the user's optimizer, such as ``beta_1``."""
        if name.startswith("_") or name == "inner_optimizer":
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option of the user's optimizer."""
        is_own = not self._complete or name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if is_own or not hasattr(self.inner_optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(self.inner_optimizer, name, value)

    def exclude_from_weight_decay(self, *arguments: Any, **named: Any) -> None:
        """Exclude variables from the weight decay of the user's optimizer."""
        self.inner_optimizer.exclude_from_weight_decay(*arguments, **named)

    @property
    def momentum(self) -> float:
        """The user's momentum, whether the optimizer or the compressor applies it. A new value takes effect at once."""
        adoption = self._dgc_reducer.adoption
        if adoption is None or not adoption.taken:
            return self.inner_optimizer.momentum
        adoption.take()
        return adoption.momentum

    @momentum.setter
    def momentum(self, value: float) -> None:
        self.inner_optimizer.momentum = value

    def _hold(self, reducer: Reducer) -> None:
        compression, inner = reducer.compression, self.inner_optimizer
        obstacle = None
        if inner.use_ema or type(inner)._apply_weight_decay is not _DECAY:
            obstacle = (
                "error_feedback='step-ahead' takes neither use_ema= nor an optimizer with a weight decay of its own: "
                "leave error_feedback out"
            )
        elif inner.gradient_accumulation_steps:
            obstacle = (
                "with error_feedback='step-ahead' pass backward_passes_per_step= to DistributedOptimizer instead of "
                "gradient_accumulation_steps= to the optimizer: so only whole steps are exchanged"
            )
        if obstacle is not None and compression is not None and compression.config.steps_ahead:
            raise ConfigError(obstacle)
        if reducer.passes > 1 and inner.gradient_accumulation_steps:
            raise ConfigError(
                "both backward_passes_per_step and the optimizer's gradient_accumulation_steps are set; choose one"
            )
        self.use_reducer(reducer)
        reducer.adopt(inner, steps_ahead=obstacle is None)
        for name in _USERS:
            self.__dict__.pop(name)
        self._complete = True

    def __dir__(self) -> list[str]:
        # Keras saves the variables of every attribute in this list. Our own `variables` contain the inner optimizer's.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    @property
    def iterations(self) -> Any:
        """The number of steps that the user's optimizer has made."""
        return self.inner_optimizer.iterations

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Save the variables; in place of a first moment that the compressor applies, save 0."""
        moment = None if self._dgc_reducer.adoption is None else self._dgc_reducer.adoption.moment
        taken = first_moments(self.inner_optimizer) if moment is not None and moment.is_taken else []
        results = {id(slot) for slot in taken}  # these slots hold the last results, and no running mean
        for i, variable in enumerate(self.variables):
            values = variable.numpy()
            store[str(i)] = np.zeros_like(values) if id(variable) in results else values

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Load saved variables, also those of a dense run: see :func:`load_variables`."""
        adoption = self._dgc_reducer.adoption
        taken = adoption is not None and adoption.taken
        if not load_variables(self.inner_optimizer, self._variables, store, taken):
            super().load_own_variables(store)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Load the values of :attr:`variables`, as for a model from an ``.h5`` file."""
        # Keras builds such a model's optimizer without the model's variables, so there may be more values.
        for variable, value in zip(self.variables, weights, strict=False):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """Return the values from which :meth:`from_config` builds the optimizer again."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "settings": self._dgc_reducer.to_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Mapping[str, object] | None = None) -> Any:
        """Build the saved optimizer. The compressor begins with empty residuals."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, Reducer.from_config(config.pop("settings")), **config)

    def _begin(self, trainable_variables: Sequence[Variable] | None) -> list[Any]:
        """Begin a step and return the variables to update. In the first step build the optimizer."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
            self.built = True
        return variables

    def _count_pass(self) -> int:
        self.inner_optimizer._iterations.assign_add(1)
        return 0


@keras.saving.register_keras_serializable(package=PACKAGE)
class DistributedOptimizer(_Distributed, keras.optimizers.Optimizer):
    """Exchanges gradients, then lets the user's optimizer apply them."""

    def __init__(self, inner_optimizer: Optimizer, reducer: Reducer, name: str | None = None) -> None:
        """Hold ``inner_optimizer``; see :func:`wrap_keras3`."""
        super().__init__(learning_rate=0.0, name=name or f"distributed_{inner_optimizer.name}")
        self.inner_optimizer = inner_optimizer
        self._hold(reducer)

    def build(self, variables: Sequence[Variable]) -> None:
        """Build the user's optimizer, too."""
        if self.built:
            return
        self._dgc_reducer.adopt(self.inner_optimizer)
        self.inner_optimizer.build(variables)
        super().build(variables)

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        """Return the children of the user's optimizer, so that ``tf.train.Checkpoint`` files fit dense runs, too."""
        if save_type != "checkpoint":
            return super()._trackable_children(save_type, **options)
        return self.inner_optimizer._trackable_children(save_type, **options)

    def _lookup_dependency(self, name: str, *arguments: Any) -> Any:
        if name == "inner_optimizer" and self._complete:
            raise ConfigError(
                "this checkpoint's optimizer is a Keras wrapper around another one (a LossScaleOptimizer); restore it "
                "with tf.train.Checkpoint(model=model, "
                "optimizer=tf.train.Checkpoint(inner_optimizer=optimizer.inner_optimizer))"
            )
        return super()._lookup_dependency(name, *arguments)

    @property
    def variables(self) -> list[Any]:
        """Our counters and the user's optimizer's variables, without the compressor's state."""
        return self._variables + self.inner_optimizer.variables

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Exchange ``grads`` and update the variables."""
        variables, inner = self._begin(trainable_variables), self.inner_optimizer
        scale = inner.loss_scale_factor
        reduced, verdict = self._dgc_reducer.reduce(grads, variables, inner, scale)
        exchange = self._dgc_reducer.follow_update(reduced, variables, inner, verdict)
        if scale is not None:
            reduced = scaled(reduced, scale)
        if self._dgc_reducer.passes == 1:
            inner.apply(reduced, variables)
        else:
            tf.cond(
                tf.equal(verdict, ACCUMULATED),
                self._count_pass,
                lambda: (inner.apply(reduced, variables), 0)[1],
            )
        exchange()
        self._iterations.assign_add(1)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the user's optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss by the fixed loss scale of the user's optimizer, if it has one."""
        return self.inner_optimizer.scale_loss(loss)

    @property
    def loss_scale_factor(self) -> Any:
        """The loss scale of the user's optimizer, or 1.0.

        After construction it is never None. A LossScaleOptimizer around this optimizer sets it to None, and Keras calls
        the setter below only if the value changes.
        """
        return (self.inner_optimizer.loss_scale_factor or 1.0) if self._complete else None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        # Keras' LossScaleOptimizer does this to the optimizer that it wraps.
        if self._complete:
            raise ConfigError(
                "a LossScaleOptimizer around the distributed optimizer decides on each rank for itself whether to "
                "step, so one rank's overflow would hang the job. Call "
                "keras.mixed_precision.set_dtype_policy('mixed_float16') before you make the distributed optimizer, or "
                "wrap the other way round: DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Let the user's optimizer finalize the values, because it may keep moving averages."""
        self.inner_optimizer.finalize_variable_values(var_list)


@keras.saving.register_keras_serializable(package=PACKAGE)
class DistributedLossScaleOptimizer(_Distributed, keras.optimizers.LossScaleOptimizer):
    """A LossScaleOptimizer that exchanges gradients first, so that all ranks make the same decision."""

    def __init__(
        self,
        inner_optimizer: Optimizer,
        reducer: Reducer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
    ) -> None:
        """Hold ``inner_optimizer``; see :func:`wrap_keras3`."""
        super().__init__(
            inner_optimizer,
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
            name=name or f"distributed_{inner_optimizer.name}",
        )
        if reducer.compression is not None and reducer.compression.given_options.get("loss_scale", 1.0) != 1.0:
            raise ConfigError(
                "the distributed optimizer unscales gradients itself under mixed_float16; leave loss_scale out of the "
                "compressor"
            )
        reducer.is_scaled = True
        self._hold(reducer)

    def build(self, variables: Sequence[Variable]) -> None:
        """Build the user's optimizer and the loss scale."""
        self._dgc_reducer.adopt(self.inner_optimizer)
        # Build it here, because Keras would build it without tracking attributes. Then a variable that is an attribute,
        # as in Nadam, would not be saved.
        self.inner_optimizer.build(variables)
        super().build(variables)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Unscale and exchange ``grads``. Update the variables unless a rank met a non-finite value."""
        variables, scale = self._begin(trainable_variables), tf.convert_to_tensor(self.dynamic_scale)
        reduced, verdict = self._dgc_reducer.reduce(grads, variables, self.inner_optimizer, scale)
        verdict = self._dgc_reducer.common_verdict(verdict)
        exchange = self._dgc_reducer.follow_update(reduced, variables, self.inner_optimizer, verdict)

        def finite() -> int:
            self.inner_optimizer.apply(reduced, variables)
            grown = tf.equal(tf.convert_to_tensor(self.step_counter), self.dynamic_growth_steps - 1)
            scale, counter = tf.convert_to_tensor(self.dynamic_scale), tf.convert_to_tensor(self.step_counter)
            self.dynamic_scale.assign(tf.where(grown, scale * 2.0, scale))
            self.step_counter.assign(tf.where(grown, tf.zeros_like(counter), counter + 1))
            return 0

        def overflow() -> int:
            self._stateful_handle_non_finite_grads()
            return 0

        branches = {ACCUMULATED: self._count_pass, APPLY: finite, REFUSED: overflow}
        tf.switch_case(verdict, branches)
        exchange()

    def get_config(self) -> dict[str, Any]:
        """Return the values from which :meth:`from_config` builds the optimizer again."""
        scale = {"initial_scale": self.initial_scale, "dynamic_growth_steps": self.dynamic_growth_steps}
        return {**super().get_config(), **scale}
