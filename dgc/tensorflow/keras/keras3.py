"""The distributed optimizers for Keras 3: they hold the user's optimizer and hand it reduced gradients.

Keras 3 calls ``apply`` with this rank's gradients and nothing else, so that is where they are exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Optimizer, is_sgd, make_slots
from dgc.tensorflow.reduce import Gradient, HasSettings, Settings, scaled
from dgc.tensorflow.tensors import ACCUMULATED, APPLY, REFUSED, Variable


def load_variables(inner: Optimizer, own: Sequence[Any], store: Mapping[str, Any], momentum_is_taken: bool) -> bool:
    """Give a distributed optimizer the values that were saved by one process, by several or by a dense run.

    What is not saved of momentum begins at 0; momentum that was saved as slots gets slots, of which the compressor
    makes its buffer in the first step.
    """
    slots = {id(slot) for slot in _slots(inner)}
    others = [v for v in inner.variables if id(v) not in slots]
    shapes = [tuple(store[str(i)].shape) for i in range(len(store.keys()))]
    trained = [tuple(v.shape) for v in inner._trainable_variables]
    slots_may_be = is_sgd(inner) and (momentum_is_taken or bool(slots))
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
    return list(getattr(inner, "momentums", None) or []) if is_sgd(inner) else []


PACKAGE = "dgc"


def wrap(optimizer: Optimizer, settings: Settings, name: str | None) -> Any:
    """Put ``optimizer`` into the distributed optimizer that fits.

    Under the policy mixed_float16 Keras puts every optimizer that is no LossScaleOptimizer into one when it compiles,
    which then decides on each rank alone whether to call us; so ours is one itself.
    """
    if isinstance(optimizer, DistributedOptimizer):  # of a model that lacks options
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distributed = DistributedLossScaleOptimizer(
            optimizer.inner_optimizer,
            settings,
            initial_scale=optimizer.initial_scale,
            dynamic_growth_steps=optimizer.dynamic_growth_steps,
            name=name,
        )
        if optimizer.built:  # of a loaded model, perhaps: the scale that it has come to goes on
            distributed.build(optimizer.inner_optimizer._trainable_variables)
            distributed.dynamic_scale.assign(optimizer.dynamic_scale)
            distributed.step_counter.assign(optimizer.step_counter)
        return distributed
    if keras.config.dtype_policy().name == "mixed_float16":
        return DistributedLossScaleOptimizer(optimizer, settings, name=name)
    return DistributedOptimizer(optimizer, settings, name=name)


def _users(name: str) -> Any:
    """An option of the user's optimizer, which scripts read from the optimizer that they compile with and set there."""

    def get(self: Any) -> Any:
        return getattr(self.inner_optimizer, name) if self._complete else None

    def set_(self: Any, value: Any) -> None:
        # Keras' constructor sets defaults, which do not count.
        if self._complete:
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"The user's optimizer's ``{name}``.")


class _Distributed(HasSettings, keras.optimizers.Optimizer):
    """The common part of both distributed optimizers."""

    inner_optimizer: Optimizer
    built: bool
    _complete = False

    weight_decay = _users("weight_decay")
    clipnorm = _users("clipnorm")
    clipvalue = _users("clipvalue")
    global_clipnorm = _users("global_clipnorm")
    ema_momentum = _users("ema_momentum")
    ema_overwrite_frequency = _users("ema_overwrite_frequency")
    nesterov = _users("nesterov")

    @property
    def momentum(self) -> float:
        """The user's own, wherever it is applied; a new one is followed from the next step on, 0 included."""
        adoption = self._dgc_settings.adoption
        if adoption is None or not adoption.taken:
            return self.inner_optimizer.momentum
        adoption.take()
        return adoption.momentum

    @momentum.setter
    def momentum(self, value: float) -> None:
        self.inner_optimizer.momentum = value

    def _hold(self, settings: Settings) -> None:
        """End of the constructors."""
        if settings.options.passes > 1 and self.inner_optimizer.gradient_accumulation_steps:
            raise ConfigError(
                "both backward_passes_per_step and the optimizer's gradient_accumulation_steps are set; choose one"
            )
        self._dgc_settings = settings
        self._prepare()
        self._complete = True

    def _prepare(self) -> None:
        """Take from the user's optimizer what the compressor does, once it is known that there are other ranks."""
        self._dgc_settings.adopt(self.inner_optimizer)

    def __dir__(self) -> list[str]:
        # Keras saves and loads the variables of all that it finds here; the user's optimizer's are among ours.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    @property
    def iterations(self) -> Any:
        """Steps that the user's optimizer has made."""
        return self.inner_optimizer.iterations

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Load what one process, several, or a dense run have saved: see :mod:`dgc.tensorflow.keras.keras3`."""
        adoption = self._dgc_settings.adoption
        taken = adoption is not None and adoption.taken
        if not load_variables(self.inner_optimizer, self._variables, store, taken):
            super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """All that :meth:`from_config` needs."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "settings": self._dgc_settings.to_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Mapping[str, object] | None = None) -> Any:
        """Build it as it was saved; the compressor begins with empty residuals."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, Settings.from_config(config.pop("settings")), **config)

    def _begin(self, trainable_variables: Sequence[Variable] | None) -> list[Any]:
        """Begin a step: the variables to update. The first step makes the optimizer's own."""
        self._prepare()
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

    def __init__(self, inner_optimizer: Optimizer, settings: Settings, name: str | None = None) -> None:
        """Hold ``inner_optimizer``; see :func:`wrap`."""
        super().__init__(learning_rate=0.0, name=name or f"distributed_{inner_optimizer.name}")
        self.inner_optimizer = inner_optimizer
        self._hold(settings)

    def build(self, variables: Sequence[Variable]) -> None:
        """Make the user's optimizer's variables."""
        if self.built:
            return
        self._prepare()
        self.inner_optimizer.build(variables)
        super().build(variables)

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        """Those of the user's optimizer: so a dense run's ``tf.train.Checkpoint`` fits, and ours fits a dense run."""
        if save_type != "checkpoint":
            return super()._trackable_children(save_type, **options)
        return self.inner_optimizer._trackable_children(save_type, **options)

    def _lookup_dependency(self, name: str, *arguments: Any) -> Any:
        if name == "inner_optimizer" and self._complete:
            raise ConfigError(
                "this checkpoint's optimizer is a Keras wrapper around another (a LossScaleOptimizer); restore it "
                "with tf.train.Checkpoint(model=model, "
                "optimizer=tf.train.Checkpoint(inner_optimizer=optimizer.inner_optimizer))"
            )
        return super()._lookup_dependency(name, *arguments)

    @property
    def variables(self) -> list[Any]:
        """Those of the user's optimizer and our own counters; the compressor's state is not among them."""
        return self._variables + self.inner_optimizer.variables

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Exchange ``grads`` and update the variables."""
        variables, inner = self._begin(trainable_variables), self.inner_optimizer
        scale = inner.loss_scale_factor
        reduced, verdict = self._dgc_settings.reduce(grads, variables, inner, scale)
        if scale is not None:
            reduced = scaled(reduced, scale)
        if self._dgc_settings.options.passes == 1:
            inner.apply(reduced, variables)
        else:
            tf.cond(
                tf.equal(verdict, ACCUMULATED),
                self._count_pass,
                lambda: (inner.apply(reduced, variables), 0)[1],
            )
        self._iterations.assign_add(1)

    @property
    def learning_rate(self) -> Any:
        """The user's optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def scale_loss(self, loss: Any) -> Any:
        """By the user's optimizer's fixed loss scale, if it has one."""
        return self.inner_optimizer.scale_loss(loss)

    @property
    def loss_scale_factor(self) -> Any:
        """Never None: setting an attribute to the value it has would pass by the setter below unseen."""
        return (self.inner_optimizer.loss_scale_factor or 1.0) if self._complete else None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        # Keras' LossScaleOptimizer does this to the optimizer that it wraps.
        if self._complete:
            raise ConfigError(
                "a LossScaleOptimizer around the distributed optimizer decides on each rank alone whether to step, and "
                "one rank's overflow would hang the job. Call keras.mixed_precision.set_dtype_policy('mixed_float16') "
                "before you make the distributed optimizer, or wrap the other way round: "
                "DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """As in the user's optimizer (moving averages)."""
        self.inner_optimizer.finalize_variable_values(var_list)


@keras.saving.register_keras_serializable(package=PACKAGE)
class DistributedLossScaleOptimizer(_Distributed, keras.optimizers.LossScaleOptimizer):
    """A LossScaleOptimizer that exchanges first and decides by what all ranks saw."""

    def __init__(
        self,
        inner_optimizer: Optimizer,
        settings: Settings,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
    ) -> None:
        """Hold ``inner_optimizer``; see :func:`wrap`."""
        super().__init__(
            inner_optimizer,
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
            name=name or f"distributed_{inner_optimizer.name}",
        )
        if settings.compression is not None and settings.compression.given_options.get("loss_scale", 1.0) != 1.0:
            raise ConfigError(
                "the distributed optimizer unscales gradients itself under mixed_float16; leave loss_scale out of the "
                "compressor"
            )
        self._hold(settings)

    def build(self, variables: Sequence[Variable]) -> None:
        """Make the user's optimizer's variables, and those of the loss scale."""
        self._prepare()
        # Keras builds it where attributes are not tracked, so that a variable which is one would not be saved (Nadam).
        self.inner_optimizer.build(variables)
        super().build(variables)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Exchange the unscaled ``grads``; update the variables unless a rank met a non-finite value."""
        variables, scale = self._begin(trainable_variables), tf.convert_to_tensor(self.dynamic_scale)
        reduced, verdict = self._dgc_settings.reduce(grads, variables, self.inner_optimizer, scale)

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

    def get_config(self) -> dict[str, Any]:
        """All that :meth:`from_config` needs."""
        scale = {"initial_scale": self.initial_scale, "dynamic_growth_steps": self.dynamic_growth_steps}
        return {**super().get_config(), **scale}
