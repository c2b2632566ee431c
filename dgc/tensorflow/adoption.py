"""Taking momentum and Nesterov out of an SGD optimizer into the compressor, so that nothing is applied twice.

Keras' velocity contains the learning rate: ``m <- mu*m - lr*g``. With ``u = -m/lr`` this is the core's
``u <- mu*u + g`` as long as lr stays; when lr changes, u must be multiplied by lr_old/lr_new. Keras' ``weight_decay``
is decoupled from the gradient and stays in the optimizer. ``tf.compat.v1``'s momentum is the core's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.core.config.config import DGCConfig
from dgc.core.exchange.records import Hyper
from dgc.errors import ConfigError
from dgc.tensorflow.tensors import raw_variable

Absorb = Callable[[int, np.ndarray, float | None], None]

_emptied: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers whose momentum a compressor has taken; it stays 0 in them."""

KERAS3, LEGACY, LEGACY_V2, V1 = "keras", "tf_keras", "tf_keras.legacy", "tf.compat.v1"


def family(optimizer: Any) -> str | None:
    """Which library an optimizer belongs to, without importing any of them; None if it is no optimizer."""
    for cls in type(optimizer).__mro__:
        module, name = cls.__module__, cls.__name__
        if module.startswith("keras.src.optimizers") and name in ("Optimizer", "BaseOptimizer"):
            return KERAS3
        if module.startswith("tf_keras.src.optimizers") and name == "OptimizerV2":
            return LEGACY_V2
        if module.startswith("tf_keras.src.optimizers") and name in ("Optimizer", "_BaseOptimizer"):
            return LEGACY
        if module.startswith("tf_keras.src.mixed_precision") and name == "BaseLossScaleOptimizer":
            return LEGACY
    return V1 if isinstance(optimizer, tf.compat.v1.train.Optimizer) else None


def learning_rate(optimizer: Any) -> Any:
    """The learning rate that ``optimizer`` will apply in the step under way: a number or a tensor."""
    kind = family(optimizer)
    if kind == LEGACY_V2:
        return optimizer._decayed_lr(tf.float32)
    if kind == LEGACY:
        # Its `learning_rate` is the one of the step before when it follows a schedule.
        rate = optimizer._learning_rate
        return rate(optimizer.iterations) if callable(rate) and not isinstance(rate, tf.Variable) else rate
    return optimizer.learning_rate


def without_loss_scale(optimizer: Any) -> Any:
    """The optimizer inside Keras' LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


class Adoption:
    """Momentum SGD's options, and the watch over the optimizer they were taken from.

    Attributes:
        hyper: the options by variable index, as the core uses them.
        optimizer: the user's optimizer or None.
        active: whether anything is taken from the optimizer at all.
        is_loss_scaled: whether a LossScaleOptimizer was given.
        momentum, nesterov: what was adopted; 0 and False if nothing.
    """

    def __init__(self, optimizer: Any, config: DGCConfig) -> None:
        """Take the momentum out of ``optimizer``, before it has made slots for it if possible.

        Args:
            optimizer: of Keras 3, legacy Keras or ``tf.compat.v1.train``; or None.
            config: ``momentum`` and ``nesterov`` that are not None are used instead of adopting.

        Raises:
            ConfigError: momentum both given and in the optimizer.
        """
        self.is_loss_scaled = without_loss_scale(optimizer) is not optimizer
        self.optimizer = optimizer = without_loss_scale(optimizer)
        self.active = _is_sgd(optimizer) and config.momentum is None
        if self.active and optimizer in _emptied and not _get_momentum(optimizer)[0]:
            raise ConfigError(
                "another compressor has taken this optimizer's momentum already, and residuals cannot be shared: build "
                "the compressor once, outside the training step"
            )
        self.momentum, self.nesterov = 0.0, False
        self.hyper = Hyper([], [], [])
        self._config = config
        self.take()

    @property
    def velocity_has_learning_rate(self) -> bool:
        """Whether u must follow changes of the learning rate."""
        return self.active and bool(self.momentum) and family(self.optimizer) != V1

    @property
    def rate_is_known(self) -> bool:
        """Whether :func:`learning_rate` works for the optimizer."""
        return self.optimizer is not None and (
            self.velocity_has_learning_rate or (family(self.optimizer) not in (None, V1))
        )

    def take(self) -> None:
        """Move the momentum that the optimizer holds now into the compressor; does nothing when there is none.

        Raises:
            ConfigError: momentum both given and in the optimizer.
        """
        if not _is_sgd(self.optimizer):
            return
        momentum, nesterov = _get_momentum(self.optimizer)
        if not momentum:
            return
        if not self.active:
            if self._config.momentum:
                raise ConfigError(
                    f"momentum would be applied twice: the compressor has momentum={self._config.momentum} and the "
                    f"optimizer has momentum={momentum}; leave momentum out of the compressor (it adopts the "
                    "optimizer's), or set the optimizer's to 0"
                )
            return
        self.momentum, self.nesterov = momentum, nesterov or self.nesterov
        _clear_momentum(self.optimizer)
        _emptied.add(self.optimizer)
        self._fill(len(self.hyper.momentum))

    def cover(self, count: int) -> None:
        """Extend ``hyper`` to ``count`` variables."""
        self._fill(count)

    def decayed(self, index: int, variable: Any) -> Any:
        """What weight decay is multiplied with: the variable's values."""
        return raw_variable(variable)

    def absorb_slots(self, variables: Sequence[Any], absorb: Absorb) -> None:
        """Turn the momentum slots that a dense run has left in the optimizer into u, and empty them.

        Args:
            variables: the compressed variables.
            absorb: called with (variable index, u, learning rate that u is in units of) for each slot that is not zero.
        """
        if not (self.active and self.momentum):
            return
        with tf.init_scope():
            rate = float(learning_rate(self.optimizer)) if self.velocity_has_learning_rate else None
            factor = 1.0 if rate is None else -1.0 / rate if rate else 0.0
            for index, variable in enumerate(variables):
                slot = _momentum_slot(self.optimizer, variable)
                if slot is None:
                    continue
                values = np.asarray(slot)
                if values.any():
                    absorb(index, values.reshape(-1) * values.dtype.type(factor), rate)
                    slot.assign(tf.zeros(slot.shape, slot.dtype))

    def _fill(self, count: int) -> None:
        config = self._config
        momentum = self.momentum if self.active else config.momentum or 0.0
        nesterov = config.nesterov if config.nesterov is not None else self.nesterov
        self.hyper = Hyper([momentum] * count, [bool(nesterov)] * count, [config.weight_decay or 0.0] * count)


def momentum_config(config: dict[str, Any], adoption: Adoption | None) -> dict[str, Any]:
    """An optimizer's ``get_config()`` with the adopted momentum put back, as a dense run would have saved it."""
    if adoption is None or not adoption.momentum:
        return config
    return {**config, "momentum": adoption.momentum, "nesterov": adoption.nesterov}


def _is_sgd(optimizer: Any) -> bool:
    names = {(c.__module__.partition(".")[0], c.__name__) for c in type(optimizer).__mro__}
    if names & {("keras", "SGD"), ("tf_keras", "SGD")}:
        return True
    return isinstance(optimizer, tf.compat.v1.train.MomentumOptimizer)


def _get_momentum(optimizer: Any) -> tuple[float, bool]:
    if family(optimizer) == V1:
        value, nesterov = optimizer._momentum, optimizer._use_nesterov
    else:
        value, nesterov = optimizer.momentum, optimizer.nesterov
    if callable(value) and not isinstance(value, (tf.Variable, tf.Tensor)):
        value = value()
    with tf.init_scope():
        return float(value), bool(nesterov)


def _clear_momentum(optimizer: Any) -> None:
    kind = family(optimizer)
    if kind == V1:
        optimizer._momentum, optimizer._use_nesterov = 0.0, False
        return
    optimizer.momentum = 0.0
    if kind == LEGACY_V2:
        # This one decides by a flag of its own whether it makes slots.
        optimizer._momentum = False
    optimizer.nesterov = False


def _momentum_slot(optimizer: Any, variable: Any) -> Any:
    kind, raw = family(optimizer), raw_variable(variable)
    if kind in (LEGACY_V2, V1):
        name = "momentum"
        return optimizer.get_slot(raw, name) if name in optimizer.get_slot_names() else None
    slots = getattr(optimizer, "momentums", None) or []
    if kind == KERAS3:
        known = {id(raw_variable(v)): m for v, m in zip(optimizer._trainable_variables, slots, strict=False)}
        slot = known.get(id(raw))
        return None if slot is None else raw_variable(slot)
    place = getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(raw)) if slots else None
    return None if place is None else slots[place]
