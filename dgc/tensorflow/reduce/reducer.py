"""Way B's one step, behind the tape and all optimizers: gradients of this rank in, reduced gradients out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.engine import DENSE, NONE, SPARSE, Engine
from dgc.tensorflow.engine.group import Group
from dgc.tensorflow.engine.horovod.horovod import is_alone
from dgc.tensorflow.engine.horovod.names import gather_slices
from dgc.tensorflow.engine.numpy_bridge import ACCUMULATED, APPLY, ENTRIES, GONE, REFUSED, Entries, Step, cross
from dgc.tensorflow.engine.optimizers import learning_rate
from dgc.tensorflow.reduce.options import DEFAULTS, ReduceOptions
from dgc.tensorflow.reduce.sparse_updates import can_hold, is_rate
from dgc.tensorflow.reduce.sums import Sums

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | Entries | None"

RETURNED = "the reduced gradients are returned to the script"
"""Why a caller of :meth:`Reducer.reduce` needs dense results, unless it says otherwise."""


class Reducer:
    """Reduces the gradients of one model, all of them in one crossing to the core.

    Attributes:
        compression: the compressor.
        passes: gradients of this many steps are added up before they are exchanged.
    """

    def __init__(
        self,
        compression: DGCCompressor,
        options: ReduceOptions = DEFAULTS,
        *,
        user: str = "a distributed optimizer",
    ) -> None:
        """Check what fits together. Talks to nobody.

        Args:
            compression: a compressor that no stock Horovod class uses.
            options: how to reduce.
            user: whose gradients these are, for the error when two share a compressor.

        Raises:
            ConfigError: another op or process set than the compressor's, or it is in use elsewhere.
        """
        self._sums = Sums(options.passes, options.average_passes)
        self.compression = compression
        self.passes = options.passes
        self._sparse_as_dense = options.sparse_as_dense
        self._process_set = options.process_set
        compression.use_way(user)
        if options.op is not None:
            compression.use_op(options.op)
        compression.process_set(options.process_set)

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        optimizer: Any = None,
        dense_for: str | None = RETURNED,
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Exchange one step's gradients, now or in the graph being built.

        Args:
            gradients: one per variable; None where the loss does not depend on it.
            variables: the same ones, in the same order, in every step.
            optimizer: whose momentum is adopted and whose learning rate counts.
            dense_for: why dense results are needed; None if the caller updates variables by entries, too
                (:func:`dgc.tensorflow.reduce.sparse_updates.update`).

        Returns:
            The reduced gradients, and an int32 scalar: ACCUMULATED, APPLY, REFUSED or ENTRIES (see
            :mod:`dgc.tensorflow.engine.numpy_bridge`).

        Raises:
            ConfigError: the gradients are results of an exchange.
            DGCError: ranks or steps differ, or a rank failed.
        """
        gradients, variables = list(gradients), list(variables)
        self.compression.bind(variables, optimizer, self._process_set)
        engine = self.compression.engine
        _refuse_results(gradients, engine)
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if engine is None and self.passes == 1:
            return gradients, _verdict_of(gradients)
        places = self._places(engine, variables)
        kinds = [NONE] * (len(variables) if engine is None else len(engine.variables))
        for place, gradient in zip(places, gradients, strict=True):
            kinds[place] = _kind(gradient)
        if engine is not None:
            engine.take_momentum()
            engine.settle(kinds)
        if self.passes > 1 and SPARSE in kinds:
            raise ConfigError(
                "backward_passes_per_step > 1 (gradient accumulation) cannot add up sparse gradients; pass "
                "sparse_as_dense=True"
            )
        reduced, verdict = self._cross(engine, gradients, variables, places, dense_for)
        if engine is not None:
            _results.update({id(r): r for r in reduced if isinstance(r, tf.Tensor)})
        return reduced, verdict

    def stand_beside_local(self, variables: Sequence[Any], optimizer: Any = None) -> None:
        """Some other variables' gradients stay on their rank. Collective in the first step, if there are ``variables``.

        Args:
            variables: those whose gradients are exchanged.
            optimizer: as in :meth:`reduce`.

        Raises:
            ConfigError: the compressor applies a momentum, which would not act on the others.
        """
        if variables:
            self.compression.bind(list(variables), optimizer, self._process_set)
        self.compression.stand_beside_local()

    @property
    def size(self) -> int:
        """Ranks that exchange; 1 where there is nobody to exchange with."""
        members = self.compression.process_set(self._process_set)
        return 1 if is_alone(members) else int(members.size())

    # -- inside --------------------------------------------------------------------------------------------------

    def _cross(
        self,
        engine: Engine | None,
        gradients: list[Gradient],
        variables: list[Any],
        places: list[int],
        dense_for: str | None,
    ) -> tuple[list[Gradient], tf.Tensor]:
        # Sorted by registration, so that a caller who orders variables differently means the same group.
        dense = sorted((place, i) for i, place in enumerate(places) if _kind(gradients[i]) == DENSE)
        positions = [i for _, i in dense]
        group = engine.group([place for place, _ in dense]) if engine is not None and dense else None
        rate: Any = None
        parameters: list[Any] = []
        if engine is not None and group is not None:
            if engine.adoption.rate_is_known:
                rate = learning_rate(engine.adoption.optimizer)
            if engine.needs_parameters():
                parameters = [engine.adoption.decayed(place, variables[i]) for place, i in dense]
        if group is not None:
            dense_for = dense_for or self._obstacle(group, [variables[i] for i in positions])
        step = _step_of(self.compression, self._sums, None if group is None else group.indices, dense_for)
        reduced: list[Gradient] = list(gradients)
        verdict = tf.constant(APPLY, tf.int32)
        if dense:
            given = [tf.convert_to_tensor(gradients[i]) for i in positions]
            held = group.sparsified if group is not None and dense_for is None else ()
            results, verdict = cross(step, given, rate, parameters, held)
            for i, result in zip(positions, results, strict=True):
                reduced[i] = result
        sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        if sparse and engine is not None:
            reduced, verdict = self._reduce_sparse(engine, reduced, {i: places[i] for i in sparse}, verdict)
        return reduced, verdict

    def _obstacle(self, group: Group, members: list[Any]) -> str | None:
        """Why entries cannot be held for anybody."""
        if not self.compression.config.sparse_updates:
            return "sparse_updates=False"
        if self.passes > 1:
            return "gradients of several passes are added up"
        if not group.sparsified:
            return "all variables travel dense"
        if not all(can_hold(members[i]) for i in group.sparsified):
            return "a variable is not of float32 or float64 on the CPU"
        return None

    def _reduce_sparse(
        self, engine: Engine, reduced: list[Gradient], sparse: dict[int, int], verdict: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sparse gradients (place here -> in the engine) travel by allgather: every rank gets all ranks' slices."""
        is_sum = self.compression.config.op == "sum"
        process_set = self.compression.process_set(self._process_set)
        # In a graph too they travel after the exchange, and so not in a step that it refuses with an error.
        with tf.control_dependencies([verdict]):
            for i, place in sparse.items():
                name = engine.sparse_names.of(engine.variables[place], process_set)
                reduced[i] = gather_slices(reduced[i], name, process_set, is_sum=is_sum)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(reduced[i].values)) for i in sparse])  # type: ignore[union-attr]
        # Who takes entries applies whatever came: there is no dense result to refuse.
        stays = tf.logical_or(finite, tf.equal(verdict, ENTRIES))
        return reduced, tf.where(stays, verdict, tf.constant(REFUSED, tf.int32))

    def _places(self, engine: Engine | None, variables: list[Any]) -> list[int]:
        if engine is None:
            return list(range(len(variables)))
        places = [engine.index_of(v) for v in variables]
        assert None not in places, "bind() has refused foreign variables"
        return [p for p in places if p is not None]


def _step_of(compression: DGCCompressor, sums: Sums, indices: Sequence[int] | None, dense_for: str | None) -> Step:
    """What a graph calls in each step.

    TensorFlow keeps what a graph calls for as long as the process lives, so this must hold neither the compressor nor
    anything that is as large as the model. The model holds the compressor (:meth:`DGCCompressor.bind`).

    Args:
        compression: the compressor.
        sums: of the reducer, which an optimizer holds where there are several passes.
        indices: of the group; None where there is nobody to exchange with.
        dense_for: why results must be dense; None if those of sparsified variables may come as entries.
    """
    alive, adding = weakref.ref(compression), weakref.ref(sums)
    several = sums.passes > 1

    def step(arrays: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        held = alive()
        if held is None:
            raise ConfigError(GONE)
        if several:
            passes = adding()
            if passes is None:
                raise ConfigError(GONE)
            arrays = passes.add(arrays, held.generation)
            if passes.passed:
                return arrays, ACCUMULATED
        engine = held.engine
        if engine is None or indices is None:
            return arrays, APPLY if all(np.isfinite(a).all() for a in arrays) else REFUSED
        # A graph is not traced anew when the user assigns another momentum.
        engine.take_momentum()
        follows = engine.adoption.velocity_has_learning_rate
        parameters: Sequence[Any] = values or [None] * len(arrays)  # type: ignore[list-item]
        group = engine.group(indices)
        engine.dense_for = dense_for
        if dense_for is None and not is_rate(rate):
            engine.dense_for = "the learning rate is not a positive number"
        holds = engine.dense_for is None
        results, refused = group.run(arrays, parameters, engine.adoption.hyper, rate, follows, holds)
        if dense_for is None:
            came = group.held()
            if holds and not came:
                engine.dense_for = "the latest step was refused, or results of it came dense"
            if came:
                return results + came, ENTRIES
            results += group.nothing_held()
        return results, REFUSED if refused else APPLY

    return step


_results: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What exchanges have returned and somebody still holds, by identity."""


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


def _kind(gradient: Gradient) -> str:
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE


def _verdict_of(gradients: Sequence[Gradient]) -> tf.Tensor:
    """APPLY or REFUSED for gradients that nobody else shares."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    if not values:
        return tf.constant(APPLY, tf.int32)
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
    return tf.where(finite, tf.constant(APPLY, tf.int32), tf.constant(REFUSED, tf.int32))
