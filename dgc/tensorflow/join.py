"""``dgc.tensorflow.join``: ranks with fewer batches take part in the steps of the others, as with ``hvd.join()``.

A joined rank gives zeros to the exchange, so that its momentum and residual are still sent. It updates nothing. When
all ranks have joined, the last exchange is undone, and all ranks load the variables of the rank that joined last.
"""

from __future__ import annotations

import copy
import warnings

import numpy as np
import tensorflow as tf

from dgc.core.message import Flags
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import optimizer_variables
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import ProcessSet, broadcast_in_order
from dgc.tensorflow.tensors import raw_variable


def join(compression: DGCCompressor) -> int:
    """Take part in the steps of ranks that still train, without data, until all ranks have joined. Collective.

    Afterwards all ranks have the last rank's trained variables and optimizer variables. Each rank keeps its own
    residuals. Other variables of the model, such as moving means, are not broadcast.

    Args:
        compression: the compressor. Every rank must have made a step with it, with a tape or an optimizer of this
            package.

    Returns:
        The rank that joined last (the highest of several), from which to broadcast; 0 in a job of one process.

    Raises:
        ConfigError: there was no such step; or Horovod's classes, a LossScaleOptimizer or ``hierarchical`` are in use.
        DGCError: this or another rank failed.

    Warns:
        RuntimeWarning: the learning rate has changed since this rank joined.
    """
    if not (isinstance(compression, DGCCompressor) and compression.is_bound):
        raise ConfigError("join() needs a compressor that has exchanged: train one batch or more on every rank first")
    engine = compression.engine
    if engine is None:
        return 0
    if compression.serves_horovod or compression.config.steps_ahead or _obstacle(engine):
        engine.fail(
            ConfigError(
                "join() needs dgc's own tape or optimizer, without LossScaleOptimizer and hierarchical=True, and "
                "error_feedback='classic' with an adaptive optimizer; else give every rank the same number of batches"
            )
        )
    last = engine.until_all_joined(lambda: engine.exchange_nothing(Flags.JOINED))
    compression.generation += 1  # forget an unfinished gradient accumulation
    members = compression.process_set()
    _take_over(engine, members, int(members.ranks[last]))
    return int(members.ranks[last])


def end_together(engine: Engine) -> None:
    """Raise an error on all ranks if only some of them end ``fit()`` at this point. If all do, change nothing."""
    if _obstacle(engine):
        return
    exchange, stats = engine.exchange, copy.deepcopy(engine.stats)
    try:
        engine.exchange_nothing(Flags.JOINED | Flags.ENDED)
    finally:
        exchange.joined = {}
    exchange.stats = stats


def _obstacle(engine: Engine) -> bool:
    return not engine.members or callable(engine.exchange.loss_scale) or engine.between.inside is not None


def _take_over(engine: Engine, members: ProcessSet, root: int) -> None:
    """Load from rank ``root`` what is equal on all ranks: variables, the optimizer's variables, momentum and rate."""
    exchange, before = engine.exchange, engine.rate
    momentum = exchange.state.shared_momentum(exchange.schedule.begin)
    rate = tf.Variable(np.nan if before is None else before, dtype=tf.float64)
    buffers = {i: tf.Variable(u) for i, u in momentum.items()}
    optimizers = map(raw_variable, optimizer_variables(engine.adoption.optimizer))
    broadcast_in_order([*engine.variables, *optimizers, *buffers.values(), rate], root, members)
    now = float(rate.numpy())
    if before is not None and now != before:
        warnings.warn(
            f"the learning rate went from {before:g} to {now:g} after this rank had joined, and its momentum was sent "
            f"as if the rate were still {before:g}: change the rate between join() and the next step",
            RuntimeWarning,
            stacklevel=3,
        )
        engine.follow(now)
    for i, u in buffers.items():
        exchange.state.set_momentum_buffer(i, u.numpy())
    engine.remember()
