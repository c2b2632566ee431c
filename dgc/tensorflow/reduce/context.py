"""Options of a wrapper, and the context in which one step's gradients are reduced."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod import HOROVOD, ProcessSet, ReduceOp, is_alone
from dgc.tensorflow.engine.numpy_bridge import Entries
from dgc.tensorflow.engine.optimizers import Optimizer
from dgc.tensorflow.engine.tensors import Variable, raw_variable

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | Entries | None"

RETURNED = "the reduced gradients are returned to the script"
"""The usual reason for dense results."""


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
        scale_local: ``scale_local_gradients``: divide gradients that stay on their rank by the number of ranks.
    """

    op: ReduceOp | None = None
    process_set: ProcessSet | None = None
    sparse_as_dense: bool = False
    passes: int = 1
    average_passes: bool = False
    predivide: float = 1.0
    scale_local: bool = True


DEFAULTS = ReduceOptions()
"""Average over the compressor's ranks, at each step."""


class LocalVariables:
    """The variables that a script has registered as local with one tape or optimizer.

    Attributes:
        scale: divide their gradients by the number of ranks, as those of an average are.
    """

    def __init__(self, scale: bool = True) -> None:
        """Begin with none."""
        self._known: set[int] = set()
        self.scale = scale

    def add(self, variable: Variable) -> None:
        """Leave this variable's gradient on its rank."""
        self._known.add(id(raw_variable(variable)))

    def shared(self, variables: Sequence[Variable]) -> list[int]:
        """Places of the variables whose gradients are exchanged."""
        return [i for i, v in enumerate(variables) if id(raw_variable(v)) not in self._known]

    def without(self, variables: Iterable[Variable]) -> list[Variable]:
        """The variables whose gradients are exchanged."""
        every = list(variables)
        return [every[i] for i in self.shared(every)]


class GradientReducer(abc.ABC):
    """Reduces gradients that are to be exchanged: compressed, or with Horovod's own collectives.

    Attributes:
        options: how.
        compression: the compressor; None if gradients are sent dense.
    """

    options: ReduceOptions
    compression: DGCCompressor | None = None

    @property
    def members(self) -> ProcessSet:
        """The process set of the exchange."""
        given = self.options.process_set
        return HOROVOD.chosen_set(given) if self.compression is None else self.compression.process_set(given)

    @property
    def size(self) -> int:
        """Ranks that exchange; 1 where there is only this one."""
        return 1 if is_alone(self.members) else int(self.members.size())

    @abc.abstractmethod
    def reduce(
        self, gradients: list[Gradient], variables: list[Variable], context: Context
    ) -> tuple[list[Gradient], tf.Tensor]:
        """See :func:`dgc.tensorflow.reduce.step.reduce`."""


@dataclass(frozen=True)
class Context:
    """The differences between callers of :func:`dgc.tensorflow.reduce.step.reduce`.

    Attributes:
        reducer: exchanges the gradients.
        local: the variables whose gradients stay on their rank.
        optimizer: whose momentum is adopted and whose learning rate counts; None where the compressor has it.
        dense_for: why dense results are needed; None if the caller also updates variables by entries
            (:func:`dgc.tensorflow.reduce.sparse_updates.update`).
        loss_scale: the factor of the gradients, divided out before anything else; None for none.
        generic_names: ``use_generic_names`` of Horovod's tape.
    """

    reducer: GradientReducer
    local: LocalVariables = field(default_factory=LocalVariables)
    optimizer: Optimizer | None = None
    dense_for: str | None = RETURNED
    loss_scale: tf.Tensor | float | None = None
    generic_names: bool = False


def require_dense_passes(gradients: Sequence[Gradient], options: ReduceOptions) -> None:
    """Refuse to add up sparse gradients of several passes.

    Raises:
        ConfigError: there are some.
    """
    if options.passes > 1 and any(isinstance(g, tf.IndexedSlices) for g in gradients):
        raise ConfigError(
            "backward_passes_per_step > 1 (gradient accumulation) cannot add up sparse gradients; pass "
            "sparse_as_dense=True"
        )
