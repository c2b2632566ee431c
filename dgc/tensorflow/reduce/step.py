"""One step's gradients of this rank in, reduced gradients out: for the tape and all optimizers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod import HOROVOD, ProcessSet, ReduceOp, is_alone
from dgc.tensorflow.engine.optimizers import Optimizer
from dgc.tensorflow.engine.tensors import Variable
from dgc.tensorflow.reduce.sums import Sums

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


@dataclass(frozen=True)
class ReduceOptions:
    """Options of a wrapper beside the optimizer and the compression.

    Attributes:
        op: Horovod's Average or Sum; None for the compressor's own, or Average.
        process_set: the ranks that exchange; None for the compressor's own, or all.
        sparse_as_dense: turn ``tf.IndexedSlices`` into tensors, which are compressed too.
        passes: ``backward_passes_per_step``: gradients of this many steps are added up before they are exchanged.
        average_passes: divide the added gradients by ``passes``.
        predivide: ``gradient_predivide_factor`` of Horovod's dense exchange: this much of the average's division is
            done before the sum. Ours divides once, in float32.
    """

    op: ReduceOp | None = None
    process_set: ProcessSet | None = None
    sparse_as_dense: bool = False
    passes: int = 1
    average_passes: bool = False
    predivide: float = 1.0


DEFAULTS = ReduceOptions()
"""Average over the compressor's ranks, at each step."""


class GradientReducer(abc.ABC):
    """Reduces the gradients of one tape or optimizer: compressed, or with Horovod's own collectives.

    Attributes:
        options: how.
        compression: the compressor; None if gradients are sent dense.
    """

    compression: DGCCompressor | None = None

    def __init__(self, options: ReduceOptions) -> None:
        """Reduce by these options."""
        self.use(options)

    def use(self, options: ReduceOptions) -> None:
        """Reduce by these options from the next step on."""
        self.options = options
        self._sums = Sums(options.passes, options.average_passes)

    @property
    def members(self) -> ProcessSet:
        """The process set of the exchange."""
        given = self.options.process_set
        return HOROVOD.of(given).members if self.compression is None else self.compression.process_set(given)

    @property
    def size(self) -> int:
        """Ranks that exchange; 1 where there is only this one."""
        return 1 if is_alone(self.members) else int(self.members.size())

    @abc.abstractmethod
    def reduce(
        self, gradients: list[Gradient], variables: list[Variable], context: Context
    ) -> tuple[list[Gradient], tf.Tensor]:
        """See :func:`reduce`."""

    def _require_dense_passes(self, gradients: Sequence[Gradient]) -> None:
        if self.options.passes > 1 and any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise ConfigError(
                "backward_passes_per_step > 1 (gradient accumulation) cannot add up sparse gradients; pass "
                "sparse_as_dense=True"
            )


@dataclass(frozen=True)
class Context:
    """The differences between callers of :func:`reduce`.

    Attributes:
        reducer: exchanges the gradients.
        optimizer: whose momentum is adopted and whose learning rate counts; None where the compressor has it.
        loss_scale: the factor of the gradients, divided out before anything else; None for none.
        generic_names: ``use_generic_names`` of Horovod's tape.
    """

    reducer: GradientReducer
    optimizer: Optimizer | None = None
    loss_scale: tf.Tensor | float | None = None
    generic_names: bool = False


@tf.autograph.experimental.do_not_convert
def reduce(
    gradients: Sequence[Gradient], variables: Sequence[Variable], context: Context
) -> tuple[list[Gradient], tf.Tensor]:
    """Exchange one step's gradients, now or in the graph being built.

    Args:
        gradients: one per variable; None where the loss does not depend on it.
        variables: the same ones, in the same order, in every step.
        context: who reduces them, and how.

    Returns:
        The reduced gradients, and an int32 scalar: ACCUMULATED, APPLY or REFUSED
        (:mod:`dgc.tensorflow.engine.numpy_bridge`).

    Raises:
        ConfigError: the gradients are results of an exchange.
        DGCError: ranks or steps differ, or a rank failed.
    """
    reducer, options = context.reducer, context.reducer.options
    gradients, variables = list(gradients), list(variables)
    if context.loss_scale is not None:
        gradients = scaled(gradients, 1.0 / context.loss_scale)
    if options.sparse_as_dense:
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return reducer.reduce(gradients, variables, context)


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor | float) -> list[Gradient]:
    """Gradients times a factor, which is cast to their types."""
    return [_changed(g, lambda values: values * tf.cast(factor, values.dtype)) for g in gradients]


def _changed(gradient: Gradient, change: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)
