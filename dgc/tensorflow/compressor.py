"""What ``compression=`` takes: ``Compression.dgc(...)`` and the compressors that it makes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter.compression import CompressionBase, checked_tensors, refused_uncalled, require_momentum_source
from dgc.adapter.compressor import CompressorBase
from dgc.core.config.checks import brief, no_compressor
from dgc.core.exchange.exchange import LossScale
from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError
from dgc.tensorflow.engine.adoption import Adoption
from dgc.tensorflow.engine.engine import Engine, loss_scale_of
from dgc.tensorflow.engine.horovod import HOROVOD, HorovodTransport, ProcessSet, is_alone
from dgc.tensorflow.engine.horovod_shim import HorovodShim, Pending, refuse_horovods_keras3
from dgc.tensorflow.engine.optimizers import Optimizer, clipping, family
from dgc.tensorflow.engine.tensors import Variable, raw_variable
from dgc.tensorflow.summary import as_writer

_LEFT = (
    "the optimizer has {0}: its momentum stays in it, so that what it does with gradients comes before momentum as in "
    "dense training, and the compressor does plain error feedback. For momentum correction {1}"
)
_INSTEAD_OF_CLIPPING = "leave the clipping out and pass local_grad_clip_norm= to the compressor"
_INSTEAD_OF_MOMENTUM = "pass momentum= to the compressor and 0 to the optimizer, if that method may see a velocity"


class DGCCompressor(CompressorBase[Engine]):
    """A compressor (Deep Gradient Compression, unless another is named) for one model and one optimizer.

    Horovod's own classes call :meth:`compress` and :meth:`decompress` while they build a graph. The wrappers of this
    package call :func:`dgc.tensorflow.reduce.step.reduce` once a step instead. With one process nothing is adopted,
    and the optimizer keeps its momentum.
    """

    adoption: Adoption | None = None
    """Momentum taken from an optimizer; None before :meth:`adopt` and in one process."""
    optimizer: Optimizer | None = None
    """The optimizer that was last given to :meth:`adopt`; None if none was."""
    _lacks_residuals = False
    """Whether it was loaded with a model, which was saved where residuals were not empty."""

    _horovod = HOROVOD
    _bound_to: Sequence[Any] = ()
    _user: str | None = None
    _shim: HorovodShim | None = None

    def _read_loss_scale(self, value: Any) -> LossScale:
        return loss_scale_of(value)

    def _writer_of(self, writer: Any) -> Any:
        return as_writer(writer)

    # -- binding -------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, process_set: ProcessSet | None = None) -> None:
        """Take the momentum out of the optimizer, before it makes its variables. Local: no communication.

        After a binding that failed, None stands for the optimizer that got its momentum back.

        Raises:
            ConfigError: momentum would be applied twice, or another optimizer was adopted before.
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
        if is_alone(self.process_set(process_set)) is False:
            self.adoption = Adoption(optimizer, self.config)
            if self.adoption.left_for and self.process_set(process_set).rank() == 0:
                advice = _INSTEAD_OF_CLIPPING if clipping(self.adoption.optimizer) else _INSTEAD_OF_MOMENTUM
                warnings.warn(_LEFT.format(self.adoption.left_for, advice), stacklevel=2)

    def bind(
        self, variables: Sequence[Variable], optimizer: Optimizer | None = None, process_set: ProcessSet | None = None
    ) -> None:
        """Attach to a model's variables; collective over the process set.

        Args:
            variables: the model's trainable variables.
            optimizer: whose momentum is adopted, if :meth:`adopt` was not called before.
            process_set: of the wrapper; None means the option's, or all ranks.

        Raises:
            ConfigError: bound to another model before, elastic Horovod, or a part of what is needed is missing.
            LayoutError: ranks disagree about the variables.
        """
        ours = [raw_variable(v) for v in variables]
        if self.is_bound:
            self._require_same_model(ours)
            return
        HOROVOD.require_ready()
        _refuse_sessions()

        def open_engine(transport: Transport, members: Any) -> Engine:
            return self._open_engine(list(variables), optimizer, transport, process_set)

        self._bind(process_set, open_engine, self._give_back)
        self._bound_to = ours
        for variable in ours[:1]:  # a model holds the compressor that was bound to it last: no graph does
            variable._dgc_compressor = self

    def _open_engine(self, variables: list[Any], optimizer: Any, transport: Transport, process_set: Any) -> Engine:
        self.adopt(optimizer, process_set)
        assert self.adoption is not None
        return Engine(variables, self.config, transport, self.adoption, self._loss_scale, self._lacks_residuals)

    def stand_beside_local(self) -> None:
        """From now on some variables' gradients stay on their rank, and the optimizer alone updates them.

        Raises:
            ConfigError: a momentum is applied here, which would not act on them. On all ranks that are in the step.
        """
        if self.adoption is None:
            return
        try:
            self.adoption.stand_beside_local()
        except ConfigError as error:
            if self.engine is not None:
                self.engine.fail_in_step(error)
            raise

    def _make_transport(self, choice: Any, members: Any) -> Transport:
        return HOROVOD.make_transport(choice, members, HorovodTransport)

    def _give_back(self) -> None:
        adoption, self.adoption = self.adoption, None
        if adoption is not None:
            adoption.undo()

    def claim(self, user: str) -> None:
        """Remember what uses this compressor: Horovod's own classes, a tape or a distributed optimizer.

        Raises:
            ConfigError: two of them do.
        """
        if self._user not in (None, user):
            raise ConfigError(
                f"this compressor is used by {self._user} and by {user} at the same time; gradients would be exchanged "
                "twice: use one of them"
            )
        self._user = user

    # -- Horovod's Compressor ------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor | None = None) -> tuple[tf.Tensor, Pending | None]:
        """For Horovod's own classes; :mod:`dgc.tensorflow.engine.horovod_shim` has more."""
        if tensor is None:  # Horovod was given the class
            raise no_compressor(DGCCompressor)
        engine = self._exchanging(
            "variables: pass model.trainable_variables of a built model and optimizer=, or use the wrappers of "
            "dgc.tensorflow, which bind them"
        )
        if engine is None:
            return tensor, None  # one process
        if self._shim is None:
            self.claim("Horovod's own classes")
            self._shim = HorovodShim(self)
        return self._shim.compress(tensor)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Pending | None) -> tf.Tensor:
        """The exchanged gradient in place of the reduced placeholder."""
        if ctx is None:
            return tensor
        assert self._shim is not None
        return self._shim.decompress(tensor, ctx)

    def __hash__(self) -> int:
        """By identity. Horovod hashes it to build an optimizer: the moment to refuse one that never calls us."""
        refuse_horovods_keras3()
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        """By identity."""
        return self is other

    # -- inside --------------------------------------------------------------------------------------------------

    def _require_same_model(self, ours: list[Any]) -> None:
        known = {id(v) for v in self._bound_to}
        foreign = [v for v in ours if id(v) not in known]
        if not foreign:
            return
        error = LayoutError(
            f"{foreign[0].name!r} is no variable of the model that this compressor was built for; residuals cannot be "
            "shared: build one compressor for each model and optimizer, and a new one when variables are added"
        )
        if self.engine is not None:
            self.engine.fail(error)
        raise error


def _refuse_sessions() -> None:
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError(
            "TensorFlow 1's graphs and sessions are not supported; call the optimizer eagerly or in a tf.function"
        )


class TensorFlowCompression(CompressionBase):
    """Values of ``compression=``; ``none`` and ``fp16`` are Horovod's.

    A compressor's first argument is ``variables``, those of a built model. Momentum and Nesterov are taken out of an
    SGD; Keras' ``weight_decay`` is decoupled from the gradient and stays in the optimizer. A tape does not know its
    optimizer, so for a tape ``optimizer`` is given without variables. ``loss_scale`` takes a LossScaleOptimizer, too.
    """

    @refused_uncalled
    def dgc(  # noqa: D102
        self, variables: Sequence[Variable] | None = None, optimizer: Optimizer | None = None, **options: Any
    ) -> DGCCompressor:
        return self._make("dgc", variables, optimizer, **options)

    def _make(
        self,
        algorithm: str,
        variables: Sequence[Variable] | None = None,
        optimizer: Optimizer | None = None,
        *,
        members: Any = None,
        **options: Any,
    ) -> DGCCompressor:
        given = None
        if variables is not None:
            advice = "model.trainable_variables of a built model"
            given = checked_tensors(variables, algorithm, "variables", advice)
        if optimizer is not None and family(optimizer) is None:
            raise ConfigError(f"optimizer is {brief(optimizer)}; give a Keras optimizer, or one of tf.compat.v1.train")
        compressor = DGCCompressor(options, algorithm, members)
        if given is not None:
            require_momentum_source(optimizer, compressor.config, "variables")
            compressor.bind(given, optimizer)
        elif optimizer is not None:
            compressor.adopt(optimizer)
        return compressor


Compression = TensorFlowCompression(HOROVOD)
