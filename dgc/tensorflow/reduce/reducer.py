"""The compressed exchange of one step, in one crossing from TensorFlow to the core."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.engine import DENSE, SPARSE, Engine, kind_of
from dgc.tensorflow.engine.horovod import gather_slices
from dgc.tensorflow.engine.numpy_bridge import (
    ACCUMULATED,
    APPLY,
    REFUSED,
    Step,
    cross,
    still_there,
    verdict_of,
)
from dgc.tensorflow.engine.tensors import Variable
from dgc.tensorflow.reduce.step import DEFAULTS, Context, Gradient, GradientReducer, ReduceOptions
from dgc.tensorflow.reduce.sums import Sums


class Reducer(GradientReducer):
    """Reduces the gradients of one model with a compressor."""

    compression: DGCCompressor

    def __init__(
        self, compression: DGCCompressor, options: ReduceOptions = DEFAULTS, *, user: str = "a distributed optimizer"
    ) -> None:
        """Check what fits together. Local: no communication.

        ``user`` names whose gradients these are, for the error when two share a compressor.

        Raises:
            ConfigError: another op or process set than the compressor's, or it is in use elsewhere.
        """
        super().__init__(options)
        self.compression = compression
        compression.claim(user)
        if options.op is not None:
            compression.use_op(options.op)
        compression.process_set(options.process_set)

    def reduce(  # noqa: D102
        self, gradients: list[Gradient], variables: list[Variable], context: Context
    ) -> tuple[list[Gradient], tf.Tensor]:
        self.compression.bind(variables, context.optimizer, self.options.process_set)
        engine = self.compression.engine
        _refuse_results(gradients, engine)
        if engine is None:
            if self.options.passes == 1:
                return gradients, verdict_of(gradients)
            self._require_dense_passes(gradients)
            return self._cross(None, gradients, variables, list(range(len(variables))))
        indices = engine.begin(variables, gradients)
        self._require_dense_passes(gradients)
        reduced, verdict = self._cross(engine, gradients, variables, indices)
        if SPARSE in map(kind_of, gradients):
            reduced, verdict = self._gather_sparse(engine, reduced, indices, verdict)
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
        """Exchange the dense gradients; the others stay as they are."""
        # Sorted by registration, so that a caller who orders variables differently means the same group.
        dense = sorted((index, i) for i, index in enumerate(indices) if kind_of(gradients[i]) == DENSE)
        if not dense:
            return gradients, tf.constant(APPLY, tf.int32)
        order = [i for _, i in dense]
        members: Sequence[int] | None = None
        rate, parameters = None, []
        if engine is not None:
            group = engine.group([index for index, _ in dense])
            members = group.indices
            rate = engine.adoption.learning_rate()
            if any(engine.adoption.hyper.weight_decay):
                parameters = [engine.adoption.decayed(index, variables[i]) for index, i in dense]
        step = _step_of(self.compression, self._sums, members)
        results, verdict = cross(step, [tf.convert_to_tensor(gradients[i]) for i in order], rate, parameters)
        reduced = list(gradients)
        for i, result in zip(order, results, strict=True):
            reduced[i] = result
        return reduced, verdict

    def _gather_sparse(
        self, engine: Engine, reduced: list[Gradient], indices: list[int], verdict: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sparse gradients are sent by allgather: every rank gets all ranks' slices."""
        process_set = self.members
        is_sum, finite = self.compression.config.op == "sum", []
        # In a graph too they are sent after the exchange, and so not in a step that it refuses with an error.
        with tf.control_dependencies([verdict]):
            for i, gradient in enumerate(reduced):
                if isinstance(gradient, tf.IndexedSlices):
                    name = engine.sparse_names.of(engine.variables[indices[i]], process_set)
                    reduced[i] = gathered = gather_slices(gradient, name, process_set, is_sum=is_sum)
                    finite.append(tf.reduce_all(tf.math.is_finite(gathered.values)))
        return reduced, tf.where(tf.reduce_all(finite), verdict, tf.constant(REFUSED, tf.int32))


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
