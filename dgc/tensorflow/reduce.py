"""One step's gradients of this rank in, reduced gradients out, for the tape and all optimizers: compressed or dense."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Optimizer
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import HOROVOD, CommonNames, ProcessSet, ReduceOp, gather_slices, import_horovod, is_alone
from dgc.tensorflow.tensors import (
    ACCUMULATED,
    APPLY,
    REFUSED,
    Step,
    Variable,
    cross,
    raw_variable,
    still_there,
    verdict_of,
)


class Sums:
    """``backward_passes_per_step`` of one reducer.

    Attributes:
        passes: so many gradients make one sum.
        passed: of the sum under way; 0 when there is none.
    """

    def __init__(self, passes: int, average: bool) -> None:
        """Begin with nothing; ``average`` divides a sum by the number of its passes."""
        self.passes, self.passed = passes, 0
        self._factor = 1.0 / passes if average else 1.0
        self._sums: list[np.ndarray] = []
        self._of: tuple[Any, ...] = ()

    def add(self, arrays: Sequence[np.ndarray], generation: int = 0) -> list[np.ndarray]:
        """Add one pass; after the last one ``passed`` is 0 again and the result complete."""
        of = generation, *(a.shape for a in arrays)
        if of != self._of:
            self._of, self.passed = of, 0
        if self.passed == 0:
            self._sums = [np.zeros(a.shape, np.float64 if a.dtype == np.float64 else np.float32) for a in arrays]
        for total, array in zip(self._sums, arrays, strict=True):
            np.add(total, array, out=total, casting="same_kind")
        self.passed = (self.passed + 1) % self.passes
        if self.passed:
            # Never the sums themselves: TensorFlow keeps what it is given, and they go on changing.
            return [total.copy() for total in self._sums]
        sums, self._sums = self._sums, []
        for total in sums:
            total *= total.dtype.type(self._factor)
        return sums


def adding_step(sums: Sums) -> Step:
    """A step that only adds up: ACCUMULATED, or APPLY after the last pass. It holds no sums: a graph keeps it."""
    reference = weakref.ref(sums)

    def step(arrays: list[np.ndarray], *_: object) -> tuple[list[np.ndarray], int]:
        total = still_there(reference)
        added = total.add(arrays)
        return added, ACCUMULATED if total.passed else APPLY

    return step


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

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        optimizer: Optimizer | None = None,
        loss_scale: tf.Tensor | float | None = None,
        generic_names: bool = False,
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Exchange one step's gradients, now or in the graph being built.

        Args:
            gradients: one per variable; None where the loss does not depend on it.
            variables: the same ones, in the same order, in every step.
            optimizer: whose momentum is adopted and whose learning rate counts; None where the compressor has it.
            loss_scale: the factor of the gradients, divided out before anything else; None for none.
            generic_names: ``use_generic_names`` of Horovod's tape.

        Returns:
            The reduced gradients, and an int32 scalar: ACCUMULATED, APPLY or REFUSED (:mod:`dgc.tensorflow.tensors`).
        """
        gradients = list(gradients)
        if loss_scale is not None:
            gradients = scaled(gradients, 1.0 / loss_scale)
        if self.options.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return self._exchange(gradients, list(variables), optimizer, generic_names)

    @abc.abstractmethod
    def _exchange(
        self, gradients: list[Gradient], variables: list[Variable], optimizer: Optimizer | None, generic_names: bool
    ) -> tuple[list[Gradient], tf.Tensor]: ...

    def _require_dense_passes(self, gradients: Sequence[Gradient]) -> None:
        if self.options.passes > 1 and any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise ConfigError(
                "backward_passes_per_step > 1 (gradient accumulation) cannot add up sparse gradients; pass "
                "sparse_as_dense=True"
            )


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor | float) -> list[Gradient]:
    """Gradients times a factor, which is cast to their types."""
    return [_changed(g, lambda values: values * tf.cast(factor, values.dtype)) for g in gradients]


def _changed(gradient: Gradient, change: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


class Reducer(GradientReducer):
    """Reduces the gradients of one model with a compressor."""

    compression: DGCCompressor

    def __init__(
        self, compression: DGCCompressor, options: ReduceOptions = DEFAULTS, *, user: str = "a distributed optimizer"
    ) -> None:
        """Check what fits together. Local: no communication.

        ``user`` names whose gradients these are, for the error when two share a compressor.
        """
        super().__init__(options)
        self.compression = compression
        compression.claim(user)
        if options.op is not None:
            compression.use_op(options.op)
        compression.process_set(options.process_set)

    def _exchange(
        self, gradients: list[Gradient], variables: list[Variable], optimizer: Optimizer | None, generic_names: bool
    ) -> tuple[list[Gradient], tf.Tensor]:
        self.compression.bind(variables, optimizer, self.options.process_set)
        engine = self.compression.engine
        _refuse_results(gradients, engine)
        if engine is None:
            if self.options.passes == 1:
                return gradients, verdict_of(gradients)
            self._require_dense_passes(gradients)
            return self._cross(None, gradients, variables, list(range(len(variables))))
        gradients = engine.densified(variables, gradients)
        reduced, verdict = self._cross(engine, gradients, variables, engine.begin(variables, gradients))
        _results.update({id(r): r for r in reduced if isinstance(r, tf.Tensor)})
        return reduced, verdict

    # -- inside --------------------------------------------------------------------------------------------------

    def _cross(
        self,
        engine: Engine | None,
        gradients: list[Gradient],
        variables: list[Variable],
        indices: list[int],
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Exchange the gradients that there are."""
        # Sorted by registration, so that a caller who orders variables differently means the same group.
        dense = sorted((index, i) for i, index in enumerate(indices) if gradients[i] is not None)
        if not dense:
            return gradients, tf.constant(APPLY, tf.int32)
        order = [i for _, i in dense]
        members: Sequence[int] | None = None
        rate, parameters = None, []
        if engine is not None:
            members = [index for index, _ in dense]
            engine.group(members)
            rate = engine.adoption.learning_rate()
            if any(engine.adoption.hyper.weight_decay):
                parameters = [engine.adoption.decayed(index, variables[i]) for index, i in dense]
        step = _step_of(self.compression, self._sums, members)
        results, verdict = cross(step, [tf.convert_to_tensor(gradients[i]) for i in order], rate, parameters)
        if engine is not None and (moment := engine.adoption.moment) is not None:
            moment.assign(verdict)
        reduced = list(gradients)
        for i, result in zip(order, results, strict=True):
            reduced[i] = result
        return reduced, verdict


def _step_of(compression: DGCCompressor, sums: Sums, indices: Sequence[int] | None) -> Step:
    """The function that a graph calls in each step.

    TensorFlow keeps what a graph calls for as long as the process lives, so this must hold neither the compressor nor
    anything that is as large as the model. The model holds the compressor (:meth:`DGCCompressor.bind`). ``indices`` is
    None in one process, where nothing is exchanged.
    """
    reference, adding, several = weakref.ref(compression), weakref.ref(sums), sums.passes > 1

    def step(arrays: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        alive = still_there(reference)
        if several:
            passes = still_there(adding)
            arrays = passes.add(arrays, alive.generation)
            if passes.passed:
                return arrays, ACCUMULATED
        if alive.engine is None or indices is None:
            return arrays, APPLY if all(np.isfinite(a).all() for a in arrays) else REFUSED
        return alive.engine.exchange(indices, arrays, rate, values)

    return step


_results: weakref.WeakValueDictionary[int, tf.Tensor] = weakref.WeakValueDictionary()
"""Results of exchanges that the script still holds, by identity."""


def _refuse_results(gradients: Sequence[Gradient], engine: Engine | None) -> None:
    if not any(g is not None and _results.get(id(g)) is g for g in gradients):
        return
    error = ConfigError(
        "these gradients were exchanged already, by a DistributedGradientTape or another distributed optimizer, and "
        "would be exchanged twice: wrap the tape or the optimizer, not both"
    )
    if engine is not None:
        engine.fail(error)
    raise error


class DenseReducer(GradientReducer):
    """Averages (or sums) gradients with Horovod's allreduce, for optimizers."""

    def __init__(self, compression: Any = None, options: ReduceOptions = DEFAULTS) -> None:
        """Remember how to reduce; ``compression`` is one of Horovod's, None for ``Compression.none``."""
        super().__init__(options)
        self._compression, self._op = compression, HOROVOD.reduce_op(options.op)
        self._names = CommonNames("dense")

    def _exchange(
        self, gradients: list[Gradient], variables: list[Variable], optimizer: Optimizer | None, generic_names: bool
    ) -> tuple[list[Gradient], tf.Tensor]:
        names = [""] * len(gradients)
        if not is_alone(self.members):
            names = [self._names.of(raw_variable(v), self.members) for v in variables]
        if self.options.passes == 1:
            return self._reduced(gradients, names)
        self._require_dense_passes(gradients)
        places = [i for i, g in enumerate(gradients) if g is not None]
        added, verdict = cross(adding_step(self._sums), [tf.convert_to_tensor(gradients[i]) for i in places], None)
        # All ranks are in the same pass, so all of them meet in the allreduce or none.
        summed, verdict = tf.cond(
            tf.not_equal(verdict, ACCUMULATED),
            lambda: self._reduced(added, [names[i] for i in places]),
            lambda: ([tf.identity(a) for a in added], verdict),
        )
        results = list(gradients)
        for place, result in zip(places, summed, strict=True):
            results[place] = result
        return results, verdict

    def _reduced(self, gradients: Sequence[Gradient], names: list[str]) -> tuple[list[Gradient], tf.Tensor]:
        reduced = list(gradients)
        if not is_alone(self.members):
            reduced = [None if g is None else self._allreduce(g, n) for g, n in zip(gradients, names, strict=True)]
        return reduced, verdict_of(reduced)

    def _allreduce(self, gradient: Any, name: str) -> Gradient:
        hvd = import_horovod()
        op, members = hvd.Average if self._op is None else self._op, self.members
        if isinstance(gradient, tf.IndexedSlices):
            return gather_slices(gradient, name, members, is_sum=op == hvd.Sum)
        scales, factor = {}, self.options.predivide
        if factor != 1.0:
            op, scales = hvd.Sum, {"prescale_factor": 1.0 / factor, "postscale_factor": factor / self.size}
        # Horovod has no kernel for bfloat16.
        given = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        result = hvd.allreduce(
            given,
            op=op,
            compression=self._compression or hvd.Compression.none,
            process_set=members,
            name=name,
            ignore_name_scope=True,
            **scales,
        )
        return tf.cast(result, gradient.dtype) if result.dtype != gradient.dtype else result


class TapeReducer(GradientReducer):
    """The reduction of Horovod's own tape, with all its options (groups, Adasum, devices)."""

    def __init__(self, tape: Any, options: ReduceOptions) -> None:
        """Reduce as ``tape`` does (of ``hvd.DistributedGradientTape``)."""
        super().__init__(options)
        self._reduce = tape._allreduce_grads

    def _exchange(
        self, gradients: list[Gradient], variables: list[Variable], optimizer: Optimizer | None, generic_names: bool
    ) -> tuple[list[Gradient], tf.Tensor]:
        return list(self._reduce(gradients, variables, generic_names)), tf.constant(APPLY, tf.int32)
