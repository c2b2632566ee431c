"""Keras 3's ``gradient_accumulation_steps`` where the passes are added up before the exchange, not in the optimizer.

Keras does more in a pass than adding: ``iterations`` counts updates while schedules count passes, and moving averages
take in the variables after every pass. All of that stays with the user's optimizer, so that it does what it would do
alone; only the sums are made elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dgc.tensorflow.engine.optimizers import Optimizer
from dgc.tensorflow.engine.tensors import Variable


def hand_over(optimizer: Optimizer) -> None:
    """Let ``optimizer`` take every gradient that it is given for the mean of all passes."""
    # An instance's method: a class of its own would be saved with the model, and loaded without us.
    optimizer._backend_apply_gradients = functools.partial(_apply_mean, optimizer)


@contextlib.contextmanager
def no_accumulators(optimizer: Optimizer) -> Iterator[None]:
    """Make no variables for sums while ``optimizer`` makes its variables."""
    steps = optimizer.gradient_accumulation_steps
    optimizer.gradient_accumulation_steps = None
    try:
        yield
    finally:
        optimizer.gradient_accumulation_steps = steps


def count_pass(optimizer: Optimizer) -> None:
    """Do what Keras does in a pass that only adds gradients up, except the addition."""
    if getattr(optimizer, "gradient_accumulation_steps", None):
        _average(optimizer)
        for variable in optimizer._trainable_variables:
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))
    optimizer._iterations.assign_add(1)


def _apply_mean(optimizer: Optimizer, gradients: Any, variables: Sequence[Variable]) -> None:
    """Keras' ``_backend_apply_gradients`` in the pass that updates, after its division by the number of passes."""
    gradients = optimizer._clip_gradients(gradients)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
    _average(optimizer)


def _average(optimizer: Optimizer) -> None:
    if not optimizer.use_ema:
        return
    variables = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(variables)
    every = optimizer.ema_overwrite_frequency
    if not every:
        return

    def overwrite() -> int:
        optimizer._overwrite_model_variables_with_average_value(variables)
        return 0

    tf.cond(tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % every, 0), overwrite, lambda: 0)
