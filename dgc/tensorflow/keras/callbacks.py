"""Callbacks for both Keras: those of Horovod, under its names, and one that saves residuals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.adapter.transport_choice import require_all_or_none
from dgc.errors import ConfigError, LayoutError
from dgc.tensorflow.adoption import KERAS3, Optimizer, family, optimizer_variables
from dgc.tensorflow.compressor import step_ahead_engines
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import HOROVOD, NEVER_AVERAGES, broadcast_in_order, import_horovod, is_alone
from dgc.tensorflow.join import end_together
from dgc.tensorflow.keras.checkpoint import CompressionCheckpoint
from dgc.tensorflow.reduce import Reducer, reducer_of
from dgc.tensorflow.step_ahead import StepAheadEngine
from dgc.tensorflow.tensors import Variable, raw_variable

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CompressionCheckpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Gives all ranks the weights and the optimizer's variables of one rank.

    It does so before the first step, or after that step if the model was not built before. If updates are exchanged, it
    also averages the ranks' variables at the end of ``fit()``. It turns off XLA if Keras chose XLA automatically (with
    a GPU), because XLA cannot compile an exchange.
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        """Broadcast from ``root_rank``. ``device`` has no effect; it exists because Horovod's callback has it."""
        super().__init__()
        self._root_rank = root_rank
        self.broadcast_done = False
        self._may_average = True  # all ranks have the same engines; not so if one of them has loaded another model
        self._epoch = self._batch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast if the model is built, and again if a rank has loaded another model since the last ``fit``.

        After such a load, set the compressor's residuals and momentum to 0, because they belong to the former model.

        Raises:
            ConfigError: ``jit_compile`` is True although Keras would not choose XLA; or the model has no variables yet,
                and ``steps_per_execution`` is above 1; or a rank has loaded a model that lacks options.
            LayoutError: a rank has loaded a model, and the other ranks continue with theirs.
        """
        _turn_off_xla(self.model)
        was_loaded = self._was_loaded()
        if was_loaded:
            self.broadcast_done = False
        if getattr(self.model, "built", False) and self.model.variables:
            self._broadcast(was_loaded)
            return
        names = ("steps_per_execution", "_steps_per_execution")
        steps = next((n for n in (getattr(self.model, name, None) for name in names) if n), 1)
        if not self.broadcast_done and not is_alone() and int(tf.convert_to_tensor(steps)) > 1:
            raise ConfigError(
                "the model has no variables yet, so they can be broadcast only after the first call of its training "
                "function; with steps_per_execution these are several steps, in which every rank would train its own "
                "model; build the model before fit(), for example by model.build(input_shape)"
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast after the first step of a model that had no variables before."""
        self._batch = batch
        if not self.broadcast_done:
            self._broadcast()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average the ranks' variables, if updates are exchanged, so that ``fit()`` ends as in dense training.

        Also remember a few values of the model, to notice a load before the next ``fit``.

        Raises:
            ConfigError: this rank has ended ``fit()`` while others still train. They raise the error, too.
        """
        engine = (reducer_of(self.model.optimizer) or Reducer()).engine
        if engine is None or not engine.is_open:
            return
        epochs, steps = self.params.get("epochs") or 0, self.params.get("steps") or 0
        is_early = self.model.stop_training and (self._epoch + 1 < epochs or self._batch + 1 < steps)
        if is_early or isinstance(engine, StepAheadEngine):
            end_together(engine)
        if isinstance(engine, StepAheadEngine):
            engine.average(self.model.optimizer)
        engine.remember()

    def _was_loaded(self) -> bool:
        """Return whether some rank's variables have changed since the last ``fit``. Collective."""
        if is_alone():
            return False
        reducer = reducer_of(self.model.optimizer) or Reducer()
        engine, compression = reducer.engine, reducer.compression
        members = HOROVOD.of(reducer.process_set).members if compression is None else reducer.members
        members = members or import_horovod().global_process_set
        engines = self._engines()
        watched: Sequence[Engine] = engines if engine is None else [engine]
        own = {
            "changed": any([each.was_changed() for each in watched]),  # a list, so that each forgets what it has seen
            "averages": [each.identity() for each in engines],
            "missing": list(reducer.missing),
            "has compressor": compression is not None,
            "has exchanged": engine is not None,
            "process set": members.process_set_id if members.included() else None,
            "never averages": _never_averages(self.model.optimizer),
        }
        ranks = HOROVOD.gather(own, "loaded")
        _refuse_one_sided(ranks)
        self._may_average = all(rank["averages"] == ranks[0]["averages"] for rank in ranks)
        return any(rank["changed"] for rank in ranks)

    def _engines(self) -> list[StepAheadEngine]:
        """Return the engines of the model that exchange updates, also those of its former optimizers."""
        found = step_ahead_engines(self.model.variables) if getattr(self.model, "built", False) else []
        own = (reducer_of(self.model.optimizer) or Reducer()).engine
        return [*found, own] if isinstance(own, StepAheadEngine) and own not in found else found

    def _broadcast(self, was_loaded: bool = False) -> None:
        if self.broadcast_done or is_alone():
            return
        optimizer = self.model.optimizer
        build = getattr(optimizer, "build", None)
        if build is not None and not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            build(self.model.trainable_variables)
        # A variable may be in the model's list and in the optimizer's; it must not be sent twice.
        of_model, reducer = _by_identity(self.model.variables), reducer_of(optimizer) or Reducer()
        if not was_loaded and self._may_average:
            for engine in self._engines():
                # So that no rank loses what it has not sent, or its moments.
                engine.average(optimizer if engine is reducer.engine else None)
        broadcast_in_order(list(of_model.values()), self._root_rank, None)
        members = reducer.members
        if members is None or members.included():
            # Outside the process set an optimizer keeps its momentum, and so has other variables.
            root = self._root_rank if members is None or self._root_rank in members.ranks else min(members.ranks)
            others = _by_identity(optimizer_variables(optimizer))
            broadcast_in_order([v for k, v in others.items() if k not in of_model], root, members)
        self.broadcast_done = True
        if reducer.engine is not None:
            reducer.engine.begin_anew(was_loaded)


def _by_identity(variables: Sequence[Variable]) -> dict[int, Any]:
    return {id(raw_variable(v)): v for v in variables}


def _never_averages(optimizer: Optimizer) -> bool:
    """Return whether this is Horovod's optimizer for Keras 3, which never exchanges anything and does not say so."""
    classes = type(optimizer).__mro__
    return any(cls.__module__ == "horovod._keras" for cls in classes) and family(optimizer) == KERAS3


def _refuse_one_sided(ranks: Sequence[dict[str, Any]]) -> None:
    """Raise an error on every rank if the optimizers of all ``ranks`` cannot train one model together."""
    if any(rank["never averages"] for rank in ranks):
        raise ConfigError(NEVER_AVERAGES)
    for number, rank in enumerate(ranks):
        if rank["missing"]:
            raise ConfigError(
                f"rank {number} has loaded a model that was saved with {', '.join(rank['missing'])}, which cannot be "
                "saved; compile it again on every rank, "
                "model.compile(optimizer=dgc.tensorflow.keras.DistributedOptimizer(model.optimizer, compression=..., "
                "process_set=...), loss=...), before you train it further"
            )
    for process_set in sorted({rank["process set"] for rank in ranks} - {None}):
        members = [n for n, rank in enumerate(ranks) if rank["process set"] == process_set]
        compressing = [n for n in members if ranks[n]["has compressor"]]
        require_all_or_none([n for n in members if n not in compressing], compressing)
        others = [n for n in members if not ranks[n]["has exchanged"]]
        if 0 < len(others) < len(members):
            raise LayoutError(
                f"rank {others[0]} has a model whose compressor has exchanged nothing yet, while other ranks continue "
                "with theirs: if it is a new model, load it on every rank, or load its weights into the existing one "
                "(model.load_weights)"
            )


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Replaces each epoch's metrics by their mean over all ranks. Place it before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        """Make the callback. ``device`` has no effect; it exists because Horovod's callback has it."""
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the metrics in ``logs``."""
        if not logs or is_alone():
            return
        hvd = import_horovod()
        # A compressor's figures differ between ranks, and may be in the logs of only one rank.
        names = sorted(n for n, value in logs.items() if np.ndim(value) == 0 and not n.startswith("compression_"))
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        means = hvd.allreduce(values, op=hvd.Average, name="dgc.metrics").numpy()
        logs.update({name: float(mean) for name, mean in zip(names, means, strict=True)})


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr`` times a function of the epoch. The arguments are Horovod's.

    ``momentum_correction`` has no effect; it exists because Horovod's callback has it.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Set the learning rate to ``initial_lr * multiplier(epoch)`` in epochs [start_epoch, end_epoch).

        ``multiplier`` is a function of the epoch, or the base of an exponential decay. With ``staircase`` the learning
        rate changes only between epochs. Without, it changes at every step; this needs ``steps_per_epoch``, unless
        Keras knows that number.

        Raises:
            ConfigError: ``initial_lr`` is None.
        """
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr is None; give the learning rate that the multiplier applies to")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.steps_per_epoch = staircase, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase or batch == 0:
            epoch = self._epoch if self.staircase else self._epoch + batch / self._steps()
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate as ``lr``."""
        if logs is not None:
            logs["lr"] = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def _steps(self) -> int:
        steps = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise ConfigError("Keras does not know the number of steps per epoch; pass steps_per_epoch=")
        return int(steps)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    Source: Goyal et al. 2017, arXiv 1706.02677, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Warm up to ``initial_lr``, the learning rate for all ranks together. ``verbose`` has no effect."""
        hvd = import_horovod()

        def multiplier(epoch: float) -> float:
            # Count one step more, so that each epoch ends at a whole number.
            epoch += 1.0 / self._steps()
            return 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, staircase=False, steps_per_epoch=steps_per_epoch)


def _turn_off_xla(model: tf.keras.Model) -> None:
    if not getattr(model, "jit_compile", False):
        return
    resolve = getattr(model, "_resolve_auto_jit_compile", None)
    if resolve is None or not resolve():
        raise ConfigError(
            "compile(jit_compile=True): XLA cannot compile the exchange of gradients, nor Horovod's; pass "
            "jit_compile=False"
        )
    # Keras does not say whether the user or "auto" chose XLA, so warn.
    model.jit_compile = False
    warnings.warn("XLA is turned off for this model: it cannot compile the exchange of gradients", stacklevel=2)
