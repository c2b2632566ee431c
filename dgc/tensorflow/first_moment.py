"""The first moment of Keras 3's Adam and its kin, kept by the compressor from the first selection of entries on.

Until then every step is Adam's own. A traced step reads ``beta_1`` from a variable that stands in the optimizer's
attribute, and which the exchange sets to 0 before the update of the first step in which entries are selected. What
u is from then on: see :mod:`dgc.core.moment`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.core.exchange.records import Hyper
from dgc.core.moment import running_mean
from dgc.tensorflow.tensors import Variable, raw_variable

KIN = ("Adam", "AdamW", "Nadam", "Adamax")
"""Classes of Keras 3 whose first moment is a running mean of gradients."""


class FirstMoment:
    """Adam's beta_1 in a variable, and the momentum and gain that the compressor has in its place.

    Attributes:
        beta1: the user's.
        is_taken: whether the compressor has the moment in this step.
        earlier_steps: that the optimizer had made before the compressor's first one; None before that.
    """

    def __init__(self, optimizer: Any, nesterov: bool) -> None:
        """Put a variable in the place of the optimizer's beta_1, which holds the same."""
        self._optimizer, self._nesterov = optimizer, nesterov
        self.is_taken, self.beta1 = False, float(optimizer.beta_1)
        with tf.init_scope():
            self._variable = tf.Variable(self.beta1, trainable=False, dtype=tf.float32, name="dgc_beta_1")
        self.earlier_steps: int | None = None
        self.follow()

    def follow(self) -> None:
        """Follow a beta_1 that was assigned since the last step."""
        attributes = vars(self._optimizer)  # Keras would save the variable with the model
        if attributes["beta_1"] is not self._variable:
            self.beta1 = float(attributes["beta_1"])
            attributes["beta_1"] = self._variable

    def give_back(self) -> None:
        """Let the optimizer have its beta_1, and its first moment, for good."""
        vars(self._optimizer)["beta_1"] = self.beta1

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's ``get_config()`` with the user's beta_1."""
        return {**config, "beta_1": self.beta1} if config.get("beta_1") is self._variable else config

    def begin(self, hyper: Hyper, steps: int, *, selects: bool) -> None:
        """Set the options of a step.

        Args:
            hyper: of all variables.
            steps: that the compressor has made.
            selects: whether entries are selected in this step.
        """
        self.is_taken, count = selects and self.beta1 > 0, len(hyper.momentum)
        momentum, gain = (
            running_mean(self.beta1, 1 + steps + (self.earlier_steps or 0)) if self.is_taken else (0.0, 1.0)
        )
        hyper.momentum[:], hyper.gain[:] = [momentum] * count, [gain] * count
        hyper.nesterov[:] = [self._nesterov] * count

    def absorb(
        self, variables: Sequence[Variable], steps: int, absorb: Callable[[int, np.ndarray, None], None]
    ) -> None:
        """Make the moments of the dense steps u. Call it in the first step in which entries are selected.

        Args:
            variables: of a group.
            steps: that the compressor has made.
            absorb: called with (place in the group, (numel,) moment with its bias corrected, None).
        """
        made = steps + (self.earlier_steps or 0)
        slots = getattr(self._optimizer, "_momentums", getattr(self._optimizer, "_m", None))
        if not (self.is_taken and made and slots):
            return
        slot_of = {id(raw_variable(v)): m for v, m in zip(self._optimizer._trainable_variables, slots, strict=False)}
        for place, variable in enumerate(variables):
            slot = slot_of.get(id(raw_variable(variable)))
            values = None if slot is None else np.asarray(raw_variable(slot))
            if values is not None and values.any():
                absorb(place, values.reshape(-1) / values.dtype.type(1.0 - self.beta1**made), None)

    def assign(self, verdict: tf.Tensor) -> None:
        """After the exchange and before the update, now or in the graph being built: let the optimizer see its beta_1.

        Args:
            verdict: of the exchange, after which the value is known.
        """
        value = functools.partial(_value, weakref.ref(self))  # what a graph calls is never dropped
        if tf.executing_eagerly():
            self._variable.assign(value())
            return
        beta1 = tf.numpy_function(value, [verdict], tf.float32, name="dgc_beta_1")
        beta1.set_shape(())
        self._variable.assign(beta1)


def _value(reference: weakref.ref[FirstMoment], *_: object) -> np.float32:
    moment = reference()
    return np.float32(0.0 if moment is None or moment.is_taken else moment.beta1)
