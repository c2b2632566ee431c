"""Taking momentum and Nesterov out of an SGD optimizer into the compressor, so that nothing is applied twice.

Keras' velocity contains the learning rate: ``m <- mu*m - lr*g``. With ``u = -m/lr`` this is the core's
``u <- mu*u + g`` as long as lr stays; when lr changes, u must be multiplied by lr_old/lr_new. Keras' ``weight_decay``
is decoupled from the gradient and stays in the optimizer.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.adapter.compression import warn_of_first_moment
from dgc.core.compressors import leaves_zeros
from dgc.core.config import DGCConfig
from dgc.core.exchange.records import Hyper
from dgc.errors import ConfigError
from dgc.tensorflow.engine.optimizers import (
    Optimizer,
    clear_momentum,
    clipping,
    first_moment,
    get_momentum,
    is_cleared,
    is_keras,
    is_sgd,
    learning_rate,
    momentum_slot,
    own_update,
    prepare_slots,
    restore_momentum,
    without_loss_scale,
)
from dgc.tensorflow.engine.tensors import Variable, raw_variable

Absorb = Callable[[int, np.ndarray, float], None]


class Adoption:
    """Momentum SGD's options, taken from an optimizer or given to the compressor.

    Attributes:
        hyper: the options by variable index, as the core uses them.
        optimizer: the user's optimizer or None.
        active: whether anything is taken from the optimizer at all.
        left_for: the clipping option or the user's method for whose sake momentum stays in the optimizer; None if it
            does not.
        is_loss_scaled: whether a LossScaleOptimizer was given.
        taken: whether momentum was adopted, whatever it is now.
        momentum, nesterov: what was adopted; 0 and False if nothing.
    """

    def __init__(self, optimizer: Optimizer | None, config: DGCConfig) -> None:
        """Take the momentum out of ``optimizer``, before it has made slots for it if possible.

        An optimizer that clips, or whose class has an update of the user's own, keeps its momentum: both are meant for
        gradients, and what the exchange returns would be a velocity. The compressor then does plain error feedback.

        Args:
            optimizer: of Keras 3 or legacy Keras; or None.
            config: ``momentum`` and ``nesterov`` that are not None are used instead of adopting.

        Raises:
            ConfigError: momentum both given and in the optimizer, or given although the optimizer clips.
        """
        self.is_loss_scaled = without_loss_scale(optimizer) is not optimizer
        self.optimizer = optimizer = without_loss_scale(optimizer)
        self.active = is_sgd(optimizer) and config.momentum is None
        self.left_for: str | None = None
        self._config = config
        self._refuse_clipped_velocity()
        if leaves_zeros(config):
            _look_at_update(optimizer, config.algorithm)
        own = own_update(optimizer)
        found = clipping(optimizer) or own
        if self.active and found and get_momentum(optimizer)[0]:
            self.active, self.left_for = False, found
        self.active = self.active and not own  # nor is a momentum taken that is assigned later
        if self.active and is_cleared(optimizer):
            raise ConfigError(
                "another compressor has taken this optimizer's momentum already, and residuals cannot be shared: build "
                "the compressor once, outside the training step"
            )
        self.momentum, self.nesterov = 0.0, False
        self.hyper = Hyper([], [], [])
        self.taken = False
        self.take()
        warn_of_first_moment(type(optimizer).__name__, first_moment(optimizer), config.momentum, "beta_1=0.0")

    def learning_rate(self, optimizer: Optimizer | None = None) -> tf.Tensor | float | None:
        """The learning rate of the step under way; None where it is not known.

        Args:
            optimizer: the one that steps, where it is Horovod's copy.
        """
        return None if self.optimizer is None else learning_rate(optimizer or self.optimizer)

    @property
    def steps(self) -> int:
        """How many the optimizer has made; 0 where it does not count them."""
        if self.optimizer is None:
            return 0
        with tf.init_scope():
            return int(np.asarray(raw_variable(self.optimizer.iterations)))

    @property
    def applies_momentum(self) -> bool:
        """Whether the compressor does, or will once it is bound."""
        return bool(self.momentum if self.active else self._config.momentum)

    def take(self) -> None:
        """Move the momentum that the optimizer holds now into the compressor; does nothing when there is none.

        In every step: what the user assigns in mid-training is followed, 0 included.

        Raises:
            ConfigError: momentum both given and in the optimizer, or it clips what is a velocity now.
        """
        self._refuse_clipped_velocity()
        if not is_sgd(self.optimizer):
            return
        momentum, nesterov = get_momentum(self.optimizer)
        if not self.active:
            if momentum and self._config.momentum:
                raise ConfigError(
                    f"momentum would be applied twice: the compressor has momentum={self._config.momentum} and the "
                    f"optimizer has momentum={momentum}; leave momentum out of the compressor (it adopts the "
                    "optimizer's), or set the optimizer's to 0"
                )
            return
        if not (self.taken or momentum):
            return
        clips = clipping(self.optimizer)
        if clips:
            raise ConfigError(
                f"the optimizer got {clips} after the compressor had taken its momentum, and would clip the velocity; "
                "set it before the compressor is built (momentum then stays in the optimizer), or clip with the "
                "compressor's local_grad_clip_norm"
            )
        if self.taken and is_cleared(self.optimizer):
            momentum = momentum or self.momentum
            if (momentum, nesterov) == (self.momentum, self.nesterov):
                return
        self.momentum, self.nesterov = momentum, nesterov
        clear_momentum(self.optimizer)
        self.taken = True
        self.cover(len(self.hyper.momentum))
        self._keep_config()

    def undo(self) -> None:
        """Give the optimizer back what was taken from it, for a construction that failed."""
        if not self.taken:
            return
        restore_momentum(self.optimizer, self.momentum)
        vars(self.optimizer).pop("get_config", None)
        self.taken, self.momentum, self.nesterov = False, 0.0, False

    def follow(self, optimizer: Optimizer | None) -> None:
        """Take the momentum of Horovod's copy of the optimizer, which is the one that steps."""
        copy = without_loss_scale(optimizer)
        if self.taken and copy is not self.optimizer and is_sgd(copy):
            clear_momentum(copy)
            self.optimizer = copy
            self._keep_config()

    def cover(self, count: int) -> None:
        """Set ``hyper`` for ``count`` variables."""
        config = self._config
        momentum = self.momentum if self.active else config.momentum or 0.0
        nesterov = config.nesterov if config.nesterov is not None else self.nesterov
        self.hyper = Hyper([momentum] * count, [bool(nesterov)] * count, [config.weight_decay or 0.0] * count)

    def decayed(self, index: int, variable: Variable) -> tf.Tensor:
        """The factor of weight decay: the variable's values."""
        return raw_variable(variable)

    def absorb_slots(self, variables: Sequence[Variable], all_variables: Sequence[Variable], absorb: Absorb) -> bool:
        """Turn the momentum slots that a dense run has left in the optimizer into u, and empty them.

        Args:
            variables: the compressed variables.
            all_variables: those of the model.
            absorb: called with (variable index, u, learning rate that u is in units of) for each slot that is not zero.

        Returns:
            Whether there were any.
        """
        found = False
        if not (self.active and self.momentum):
            return found
        prepare_slots(self.optimizer, all_variables)
        with tf.init_scope():
            rate = float(learning_rate(self.optimizer))
            factor = -1.0 / rate if rate else 0.0
            for index, variable in enumerate(variables):
                slot = momentum_slot(self.optimizer, variable)
                if slot is None:
                    continue
                values = np.asarray(slot)
                if values.any():
                    absorb(index, values.reshape(-1) * values.dtype.type(factor), rate)
                    slot.assign(tf.zeros(slot.shape, slot.dtype))
                    found = True
        return found

    def refuse_beside(self, others: str, refusal: str) -> None:
        """Refuse a momentum (by ``refusal``) or decay of the compressor, which would not act on ``others``.

        Raises:
            ConfigError: it has one.
        """
        if self.applies_momentum:
            raise ConfigError(refusal)
        if self._config.weight_decay:
            raise ConfigError(
                f"weight_decay={self._config.weight_decay} of the compressor would not act on {others}: leave it out "
                "and let the optimizer apply one of its own"
            )

    def _refuse_clipped_velocity(self) -> None:
        """Refuse an optimizer that clips what the compressor's own momentum makes."""
        clips = clipping(self.optimizer)
        if clips and self._config.momentum:
            raise ConfigError(
                f"the optimizer's {clips} would clip the velocity that momentum={self._config.momentum} of the "
                "compressor makes, not the gradient: leave momentum to the optimizer (momentum=0 in the compressor), "
                "or clip with the compressor's local_grad_clip_norm instead"
            )

    def _keep_config(self) -> None:
        """Let the optimizer's configuration hold the user's own momentum."""
        # An instance's method: a class of its own would be saved with the model, and loaded without us.
        self.optimizer.get_config = functools.partial(_own_config, self)


def _look_at_update(optimizer: Optimizer | None, algorithm: str) -> None:
    """Refuse or warn of an optimizer that is not sound on gradients of which few entries are sent.

    Raises:
        ConfigError: it makes NaN of them.
    """
    # It divides by the product of two means of squares, each epsilon_1 where a row and a column of a gradient hold
    # zeros alone; the product must not be 0 in float32.
    if optimizer is not None and is_keras(optimizer, "Adafactor") and optimizer.epsilon_1 < 1e-16:
        raise ConfigError(
            f"Keras' Adafactor with epsilon_1={optimizer.epsilon_1:g} makes NaN of gradients of which few entries are "
            f"sent, as by {algorithm!r}: give it epsilon_1=1e-12, or take one of those that docs/tuning.md calls sound"
        )
    if is_keras(optimizer, "Lion"):
        warnings.warn(
            f"{algorithm!r} sends few entries, and Lion goes on by the sign of the last one: begin with a tenth "
            "of dense training's learning rate, or take one of the optimizers that docs/tuning.md calls sound",
            RuntimeWarning,
            stacklevel=4,
        )


def momentum_config(config: dict[str, Any], adoption: Adoption | None) -> dict[str, Any]:
    """An optimizer's ``get_config()`` with the adopted momentum put back, as a dense run would have saved it."""
    # A momentum that was assigned since the last step, by a schedule perhaps, is in the optimizer.
    if adoption is None or not adoption.taken or not is_cleared(adoption.optimizer) or "momentum" not in config:
        return config
    return {**config, "momentum": adoption.momentum}


def _own_config(adoption: Adoption) -> dict[str, Any]:
    return momentum_config(type(adoption.optimizer).get_config(adoption.optimizer), adoption)
