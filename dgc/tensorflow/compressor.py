"""The values of ``compression=``: ``Compression.dgc(...)`` and the compressors that it makes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter.agreement import gather_if_different, tell_error
from dgc.adapter.checks import checked_tensors, require_momentum_source, warn_of_sparsity, warn_of_thin_updates
from dgc.adapter.compressor import CompressionBase
from dgc.core.checks import as_loss_scale, brief
from dgc.core.collectives import Transport
from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import LossScale
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import KERAS3, Adoption, Optimizer, family, is_adaptive, without_loss_scale
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import HOROVOD, HorovodCompressor, ProcessSet, is_alone
from dgc.tensorflow.step_ahead import StepAheadEngine
from dgc.tensorflow.tensors import Variable, raw_variable, unique_names

_LEFT = (
    "the optimizer has {0}, which comes before momentum in dense training: so momentum stays in the optimizer, and the "
    "compressor does plain error feedback. For momentum correction {1}"
)
_INSTEAD_OF_CLIPPING = "leave the clipping out and pass local_grad_clip_norm= to the compressor"
_INSTEAD_OF_ADDING = "pass backward_passes_per_step= to the wrapper instead, which also sends only the sum"
_INSTEAD_OF_MOMENTUM = "pass momentum= to the compressor and 0 to the optimizer, if that method may see a velocity"


def require_classic(config: DGCConfig, user: str) -> None:
    """Refuse step-ahead error feedback, because ``user`` exchanges gradients."""
    if config.steps_ahead:
        raise ConfigError(
            f"{user} exchanges gradients, and error_feedback='step-ahead' exchanges what the optimizer has changed: "
            "give Compression.dgc(error_feedback='step-ahead'), without variables and optimizer, to "
            "dgc.tensorflow.keras.DistributedOptimizer of Keras 3, or leave error_feedback out"
        )


class DGCCompressor(HorovodCompressor):
    """A compressor (Deep Gradient Compression, unless another is named) for one model and one optimizer.

    The wrappers of this package call :meth:`dgc.tensorflow.reduce.Reducer.reduce` once a step. In a job of one process
    the optimizer keeps its momentum.

    Attributes:
        optimizer: the optimizer of the latest :meth:`adopt`.
        names: the first known names of the variables. They are saved with a model, because loading may rename them.
    """

    optimizer: Optimizer | None = None
    names: Sequence[str] = ()
    _lacks_residuals = False  # whether the compressor of a saved model had residuals, which are not saved with a model

    def _read_loss_scale(self, value: Any) -> LossScale:
        if family(value) == KERAS3 and hasattr(value, "initial_scale"):  # before build() it has no dynamic_scale
            return lambda: float(value.dynamic_scale if value.built else value.initial_scale)
        for name in ("dynamic_scale", "loss_scale"):
            if hasattr(value, name):
                return lambda: float(getattr(value, name))
        return as_loss_scale(value, "LossScaleOptimizer")

    def variable_names(self) -> list[str]:
        """Return the variables' names, which are saved with a model; empty before :meth:`bind`."""
        return list(self.names if self.engine is None else self.engine.names)

    # -- binding -------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, process_set: ProcessSet | None = None, *, steps_ahead: bool = False) -> None:
        """Take the momentum out of the optimizer, before it makes its variables. Not collective.

        ``steps_ahead`` says that the caller can exchange the optimizer's updates.
        After :meth:`bind` has failed, ``optimizer`` may be None, which stands for the previous optimizer.
        """
        if self.adoption is not None:
            if optimizer is not None and self.adoption.optimizer is not optimizer:
                raise ConfigError(
                    "this compressor already belongs to another optimizer; residuals cannot be shared: build one "
                    "compressor for each model and optimizer"
                )
            self.adoption.take()
            return
        self.optimizer = optimizer = self.optimizer if optimizer is None else optimizer
        self.config = self.config.suited(is_adaptive(without_loss_scale(optimizer)), steps_ahead=steps_ahead)
        if is_alone(self.process_set(process_set)) is False:
            own = dataclasses.replace(self.config, momentum=0.0) if self.config.steps_ahead else self.config
            self.adoption = Adoption(optimizer, own)
            left = self.adoption.left_for
            if left and self.process_set(process_set).rank() == 0:
                advice = _INSTEAD_OF_CLIPPING if "clip" in left.partition("=")[0] else _INSTEAD_OF_ADDING
                warnings.warn(_LEFT.format(left, advice if "=" in left else _INSTEAD_OF_MOMENTUM), stacklevel=2)

    def bind(
        self, variables: Sequence[Variable], optimizer: Optimizer | None = None, process_set: ProcessSet | None = None
    ) -> None:
        """Attach the compressor to a model's variables. Collective over the process set.

        Args:
            variables: the model's trainable variables.
            optimizer: the optimizer whose momentum is taken, if :meth:`adopt` was not called before.
            process_set: the wrapper's process set; None means the option ``process_set``, or all ranks.
        """
        if self.is_bound:
            if self.engine is not None:
                self.engine.indices(variables)
            return
        HOROVOD.require_ready()
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ConfigError(
                "TensorFlow 1's graphs and sessions are not supported; call the optimizer eagerly or in a tf.function"
            )

        if self._pending is not None:
            self.names = self._pending.get("names", self.names)
        self._bind(
            process_set,
            lambda transport: self.open_engine(list(variables), optimizer, transport, process_set),
            self._give_back,
        )
        own = without_loss_scale(self.optimizer)
        if self.engine is not None and self.engine.transport.rank == 0:
            warn_of_sparsity(self.config, self.given_options, is_adaptive(own))
            if is_adaptive(own):
                warn_of_thin_updates(type(own).__name__, self.config)
        if self.engine is None and len(self.names) != len(variables):
            self.names = unique_names(variables)
        for variable in variables:  # the model must keep its compressor alive, because graphs do not
            raw_variable(variable)._dgc_compressor = self

    def open_engine(self, variables: list[Any], optimizer: Any, transport: Transport, process_set: Any) -> Engine:
        """Make the engine of these variables, for :meth:`bind`. Collective. A subclass may make another one."""
        former = [each for each in step_ahead_engines(variables) if each.transport.size == transport.size]
        # Ranks differ if one of them has loaded another model.
        if gather_if_different(transport, {"former": [each.identity() for each in former]}) is None:
            with tf.init_scope():  # Keras may be tracing a graph
                for each in former:
                    each.average()  # what it has not sent would be lost
                    each.was_changed()  # so that this change is no load
        try:
            self.adopt(optimizer, process_set)
        except Exception as error:
            tell_error(transport, error)
            raise
        assert self.adoption is not None
        self.config = self.config.on_ranks(transport.size)
        kind = StepAheadEngine if self.config.steps_ahead else Engine
        return kind(
            variables, self.config, transport, self.adoption, self._loss_scale, self._lacks_residuals, self.names
        )

    def _give_back(self) -> None:
        adoption, self.adoption = self.adoption, None
        if adoption is not None:
            adoption.give_back()

    def close(self) -> None:
        """End the communication thread, and give the optimizer its momentum back for dense training."""
        super().close()
        if self.adoption is not None:
            self.adoption.give_back()


def step_ahead_engines(variables: Sequence[Variable]) -> list[StepAheadEngine]:
    """Return the engines that exchange updates of these variables, for the present optimizer or a former one."""
    found = {id(c): c.engine for v in map(raw_variable, variables) if (c := getattr(v, "_dgc_compressor", None))}
    engines = [each for each in found.values() if isinstance(each, StepAheadEngine)]
    return [each for each in engines if each.is_open and not each.exchange.has_failed]


class TensorFlowCompression(CompressionBase[Sequence[Variable], Optimizer, DGCCompressor]):
    """The values of ``compression=``.

    The first argument of a compressor's constructor is ``model.trainable_variables`` of a built model. Momentum and
    Nesterov are taken from an SGD. Keras' ``weight_decay`` is decoupled from the gradient and stays in the optimizer. A
    tape does not know its optimizer, so for a tape give ``optimizer`` without variables. ``loss_scale`` also accepts a
    LossScaleOptimizer.
    """

    def _make(
        self,
        algorithm: str,
        parameters: Sequence[Variable] | None = None,
        optimizer: Optimizer | None = None,
        **options: Any,
    ) -> DGCCompressor:
        given = None
        with self._errors_on_all_ranks(parameters, options):
            if parameters is not None:
                advice = "model.trainable_variables of a built model"
                given = checked_tensors(parameters, algorithm, "variables", advice)
            if optimizer is not None and family(optimizer) is None:
                raise ConfigError(f"optimizer is {brief(optimizer)}; give a Keras optimizer")
            compressor = DGCCompressor(options, algorithm)
            if compressor.config.late:
                raise ConfigError("late=True is for PyTorch only; leave it out")
            if given is not None or optimizer is not None:
                require_classic(compressor.config, "a tape, or Horovod's own class,")
            if given is not None:
                require_momentum_source(optimizer, compressor.config, "variables")
        if given is not None:
            compressor.bind(given, optimizer)
        elif optimizer is not None:
            compressor.adopt(optimizer)
        return compressor


Compression = TensorFlowCompression(HOROVOD)
