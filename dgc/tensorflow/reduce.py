"""Reduce one step's gradients over the ranks, compressed or dense, for the tape and all optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.adapter.transport_choice import require_no_choice
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Adoption, Optimizer, without_loss_scale
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import HOROVOD, ProcessSet, gather_slices, import_horovod, is_alone
from dgc.tensorflow.step_ahead import StepAheadEngine
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
    """Adds up the gradients of several backward passes, for ``backward_passes_per_step``.

    Attributes:
        passes: the number of passes that make one sum.
        passed: the number of passes in the current sum; 0 when there is none.
    """

    def __init__(self, passes: int, average: bool) -> None:
        """``average`` divides a sum by the number of its passes."""
        self.passes, self.passed = passes, 0
        self._factor = 1.0 / passes if average else 1.0
        self._sums: list[np.ndarray] = []
        self._of: tuple[Any, ...] = ()

    def add(self, arrays: Sequence[np.ndarray], generation: int = 0) -> list[np.ndarray]:
        """Add one pass and return the sum, which is complete when ``passed`` is 0 again."""
        of = generation, *(a.shape for a in arrays)
        if of != self._of:
            self._of, self.passed = of, 0
        if self.passed == 0:
            self._sums = [np.zeros(a.shape, np.float64 if a.dtype == np.float64 else np.float32) for a in arrays]
        for total, array in zip(self._sums, arrays, strict=True):
            np.add(total, array, out=total, casting="same_kind")
        self.passed = (self.passed + 1) % self.passes
        if self.passed:
            # Return copies, because TensorFlow keeps the arrays that it is given, and these sums still change.
            return [total.copy() for total in self._sums]
        sums, self._sums = self._sums, []
        for total in sums:
            total *= total.dtype.type(self._factor)
        return sums


Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


# These arguments of a reducer are saved with a model as they are.
_SAVED = ("op", "sparse_as_dense", "passes", "average_passes", "predivide")

# Types of a compressor's options that can be saved with a model.
_PLAIN = (bool, int, float, str, list, tuple, type(None))


class Reducer:
    """Reduces the gradients of one tape or optimizer: compressed, or with Horovod's allreduce.

    A distributed optimizer saves the arguments of its reducer with the model.

    Attributes:
        compression: the compressor; None if gradients are sent dense.
        process_set: the ranks that exchange; None for the compressor's ranks, or all ranks.
        passes: gradients of this many backward passes are added up before they are exchanged.
        lost: names of options that a loaded model lacks, because they could not be saved with it.
        is_scaled: whether the optimizer scales its loss.
    """

    is_scaled = False

    def __init__(
        self,
        compression: Any = None,
        *,
        op: str = "average",
        process_set: ProcessSet | None = None,
        sparse_as_dense: bool = False,
        passes: int = 1,
        average_passes: bool = False,
        predivide: float = 1.0,
        lost: Sequence[str] = (),
        user: str = "a distributed optimizer",
    ) -> None:
        """Check the arguments, without asking other ranks.

        Args:
            compression: a compressor of dgc, one of Horovod's, or None for ``Compression.none``.
            op: "average" or "sum", for the dense exchange; a compressor has its own op.
            process_set: the ranks that exchange.
            sparse_as_dense: turn ``tf.IndexedSlices`` into tensors, which can be compressed.
            passes: ``backward_passes_per_step``.
            average_passes: divide the added gradients by ``passes``.
            predivide: ``gradient_predivide_factor`` of the dense exchange; a compressor divides only once, in float32.
            lost: options that could not be saved with the model.
            user: names the owner, for the error when two users share a compressor.
        """
        self.op, self.process_set, self.sparse_as_dense = op, process_set, sparse_as_dense
        self.passes, self.average_passes, self.predivide = passes, average_passes, predivide
        self.lost = tuple(lost)
        self._sums = Sums(passes, average_passes)
        self.compression: DGCCompressor | None = None
        if isinstance(compression, DGCCompressor):
            self.compression = compression
            compression.claim(user)
            compression.process_set(process_set)
        else:
            HOROVOD.of(process_set)  # refuses other objects than process sets
            self._horovods = compression
        self._known: dict[int, tuple[str, Any]] = {}  # names of collectives by variable, and the variables
        self._prefix = ""

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        optimizer: Optimizer | None = None,
        loss_scale: tf.Tensor | float | None = None,
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Exchange one step's gradients, now or in the graph being built.

        Args:
            gradients: one for each variable; None if the loss does not depend on the variable.
            variables: the same variables, in the same order, in every step.
            optimizer: the optimizer, for its momentum and learning rate; None if the compressor has it.
            loss_scale: the gradients are divided by this number first; None does nothing.

        Returns:
            The reduced gradients, and an int32 scalar: ACCUMULATED, APPLY or REFUSED (:mod:`dgc.tensorflow.tensors`).
        """
        self.require_complete()
        gradients, variables = list(gradients), list(variables)
        if loss_scale is not None:
            gradients = scaled(gradients, 1.0 / loss_scale)
        if self.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if self.compression is None:
            return self._dense(gradients, variables)
        self.bind(variables, optimizer)
        engine = self.engine
        _refuse_results(gradients, engine)
        if engine is not None and not isinstance(engine, StepAheadEngine):
            return self._compressed(engine, gradients, variables)
        return (gradients, verdict_of(gradients)) if self.passes == 1 else self._added(gradients)

    @tf.autograph.experimental.do_not_convert
    def common_verdict(self, verdict: tf.Tensor) -> tf.Tensor:
        """Return a verdict of :meth:`reduce` that is the same on all ranks, now or in the graph being built."""
        engine, compression = self.engine, self.compression
        if compression is None or not isinstance(engine, StepAheadEngine):
            return verdict
        reference = weakref.ref(compression)

        def agree(*arguments: Any) -> tuple[list[np.ndarray], int]:
            engine = still_there(reference).engine
            assert isinstance(engine, StepAheadEngine)
            return [], engine.common_verdict(int(arguments[-1][0]))

        return cross(agree, [], None, [verdict])[1]

    @tf.autograph.experimental.do_not_convert
    def follow_update(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        optimizer: Optimizer,
        verdict: tf.Tensor,
    ) -> Callable[[], None]:
        """With step-ahead error feedback, read the variables before the optimizer's update.

        Args:
            gradients: the results of :meth:`reduce`, which the optimizer will apply.
            variables: as in :meth:`reduce`.
            optimizer: the optimizer.
            verdict: the verdict of :meth:`reduce`, or of :meth:`common_verdict`.

        Returns:
            A function that exchanges the update after it, now or in the graph being built.
        """
        engine, compression = self.engine, self.compression
        if compression is None or not isinstance(engine, StepAheadEngine):
            return lambda: None
        if any(getattr(v, "constraint", None) is not None for v in variables):
            engine.fail(
                ConfigError(
                    "a variable has a constraint, which would hold before the exchange of updates and not after it: "
                    "give the compressor error_feedback='classic'"
                )
            )
        rate = tf.cast(tf.convert_to_tensor(optimizer.learning_rate), tf.float32)
        pairs = [
            (i, tf.convert_to_tensor(g))
            for i, g in zip(engine.indices(variables), gradients, strict=True)
            if g is not None
        ]
        decay = rate * tf.cast(0.0 if optimizer.weight_decay is None else optimizer.weight_decay, tf.float32)
        given = [g for _, g in pairs]
        if engine.is_scaled:
            refused = tf.equal(verdict, REFUSED)
            given, decay = [tf.where(refused, tf.zeros_like(g), g) for g in given], tf.where(refused, 0.0, decay)
        decaying = {id(v) for v in map(raw_variable, variables) if optimizer._use_weight_decay(v)}
        before = [v.read_value() for v in engine.variables]
        places = [(i, id(engine.variables[i]) in decaying) for i, _ in pairs]
        step = _step_ahead_of(compression, places)

        def exchange() -> int:
            now = [v.read_value() for v in engine.variables]
            values, _ = cross(step, now, rate, [decay, *given, *before])
            for variable, value in zip(engine.variables, values, strict=True):
                variable.assign(value)
            return 0

        def follow() -> None:
            if self.passes == 1:
                exchange()
            else:
                tf.cond(tf.equal(verdict, ACCUMULATED), lambda: 0, exchange)

        return follow

    @property
    def engine(self) -> Engine | None:
        """The compressor's engine; None without a compressor, before it is bound, and in a job of one process."""
        return None if self.compression is None else self.compression.engine

    @property
    def members(self) -> ProcessSet | None:
        """The process set in which the compressor exchanges; None for all ranks, and without a compressor."""
        members = None if self.compression is None else self.compression.process_set(self.process_set)
        return None if members is import_horovod().global_process_set else members

    # -- binding and saving ------------------------------------------------------------------------------------------

    @property
    def adoption(self) -> Adoption | None:
        """The options that the compressor has adopted; None without a compressor."""
        return None if self.compression is None else self.compression.adoption

    def adopt(self, optimizer: Optimizer, *, steps_ahead: bool = False) -> None:
        """Take the optimizer's momentum before it makes its variables, unless options are missing.

        ``steps_ahead`` says that the caller also calls :meth:`follow_update`.
        """
        if self.compression is not None and not self.lost:
            self.compression.adopt(optimizer, self.process_set, steps_ahead=steps_ahead)

    def bind(self, variables: Sequence[Variable], optimizer: Optimizer | None) -> None:
        """Attach the compressor to the model before the first step. Collective."""
        self.require_complete()
        if self.compression is not None:
            self.compression.bind(variables, optimizer, self.process_set)
            if isinstance(self.engine, StepAheadEngine):
                self.engine.is_scaled = self.is_scaled

    @property
    def missing(self) -> Sequence[str]:
        """Names of the options that a loaded model lacks but needs in order to exchange gradients."""
        return self.lost if self.lost and is_alone(self.process_set) is not True else ()

    def require_complete(self) -> None:
        """Refuse to train a loaded model that lacks options which could not be saved.

        Loading such a model is allowed, so that a script can evaluate it, save it, or give it the options again.
        """
        if self.missing:
            raise ConfigError(
                f"the model was saved with {', '.join(self.lost)}, which cannot be saved; before you train it "
                "further, compile it again on every rank: model.compile(optimizer=dgc.tensorflow.keras."
                "DistributedOptimizer(model.optimizer, compression=..., process_set=...), loss=...)"
            )

    def to_config(self) -> dict[str, Any]:
        """Return plain values from which :meth:`from_config` builds the reducer again."""
        config: dict[str, Any] = {name: getattr(self, name) for name in _SAVED}
        config.update(options=None, lost=list(self.lost))
        if self.process_set is not None:
            config["lost"].append("process_set")
        if self.compression is not None:
            given = self.compression.given_options
            config["options"] = {k: v for k, v in given.items() if isinstance(v, _PLAIN) and k != "op"}
            config["options"]["op"] = self.compression.config.op
            config["algorithm"] = self.compression.config.algorithm
            engine, lacks = self.compression.engine, self.compression._lacks_residuals
            has_stepped = engine is not None and engine.stats.steps > 0
            config["lacks_residuals"] = self.compression.residual_norm > 0 if has_stepped else lacks
            config["names"] = self.compression.variable_names()
            config["lost"] += [k for k, v in given.items() if not isinstance(v, _PLAIN) and k != "op"]
        elif self._horovods not in (None, import_horovod().Compression.none):
            config["lost"].append("compression")
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Reducer:
        """Build a reducer from the result of :meth:`to_config`. The compressor begins with empty residuals."""
        options, lost = config["options"], config["lost"]
        compression = None
        if options is not None:
            compression = DGCCompressor(options, config["algorithm"])
            compression._lacks_residuals, compression.names = config["lacks_residuals"], config["names"]
        return cls(compression, lost=lost, **{name: config[name] for name in _SAVED})

    # -- inside --------------------------------------------------------------------------------------------------

    def _compressed(
        self, engine: Engine, gradients: list[Gradient], variables: list[Variable]
    ) -> tuple[list[Gradient], tf.Tensor]:
        indices, gradients = engine.begin(variables, gradients)
        # Sort by index, so that the order of the caller's variables does not matter.
        dense = sorted((index, i) for i, index in enumerate(indices) if gradients[i] is not None)
        if not dense:
            return gradients, tf.constant(APPLY, tf.int32)
        members = [index for index, _ in dense]
        engine.require_members(members)
        adoption, places, parameters = engine.adoption, [i for _, i in dense], []
        if any(adoption.hyper.weight_decay):
            parameters = [adoption.decayed(index, variables[i]) for index, i in dense]
        own = [variables[i] for i in places]
        reduced, verdict = self._crossed(gradients, places, members, adoption.learning_rate(), parameters, own)
        if adoption.moment is not None:
            adoption.moment.assign(verdict)
        _results.update({id(r): r for r in reduced if isinstance(r, tf.Tensor)})
        return reduced, verdict

    def _added(self, gradients: list[Gradient]) -> tuple[list[Gradient], tf.Tensor]:
        """Add up this rank's gradients over passes. The verdict is ACCUMULATED until the last pass."""
        if any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise ConfigError(
                "backward_passes_per_step > 1 (gradient accumulation) cannot add up sparse gradients; pass "
                "sparse_as_dense=True"
            )
        return self._crossed(gradients, _places(gradients))

    def _crossed(
        self,
        gradients: list[Gradient],
        places: list[int],
        indices: Sequence[int] | None = None,
        rate: tf.Tensor | float | None = None,
        parameters: Sequence[Variable] = (),
        variables: Sequence[Variable] = (),
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Add up the gradients in ``places`` over passes. If the variables' ``indices`` are given, exchange the sum."""
        step = _built_step_of(self.compression, self._sums, indices)
        given = [tf.convert_to_tensor(gradients[i]) for i in places]
        results, verdict = cross(step, given, rate, parameters, variables)
        return _replaced(gradients, places, results), verdict

    def _dense(self, gradients: list[Gradient], variables: list[Variable]) -> tuple[list[Gradient], tf.Tensor]:
        """Average or sum gradients with Horovod's own collectives."""
        members = HOROVOD.of(self.process_set).members
        names = None if is_alone(members) else [self._name(raw_variable(v), members) for v in variables]
        places = _places(gradients)

        def exchange(given: list[Gradient]) -> tuple[list[Gradient], tf.Tensor]:
            reduced = [given[i] if names is None else self._allreduce(given[i], names[i], members) for i in places]
            return reduced, verdict_of(reduced)

        if self.passes == 1:
            results, verdict = exchange(gradients)
        else:
            added, passed = self._added(gradients)
            # All ranks are in the same pass, so either all or none of them call the allreduce.
            results, verdict = tf.cond(
                tf.not_equal(passed, ACCUMULATED),
                lambda: exchange(added),
                lambda: ([tf.identity(added[i]) for i in places], passed),
            )
        return _replaced(gradients, places, results), verdict

    def _name(self, variable: tf.Variable, members: ProcessSet) -> str:
        """Return a collective's name for a variable. The first call is collective.

        Variables are numbered in the order of their first use, because Keras' names contain counters, which differ on a
        rank that has built another model before.
        """
        if not self._known:
            job = HOROVOD.of(members)
            require_no_choice(job.module().rank(), job.gather)
            self._prefix = job.unique_name("dgc.dense")
        return self._known.setdefault(id(variable), (f"{self._prefix}.{len(self._known)}", variable))[0]

    def _allreduce(self, gradient: Any, name: str, members: ProcessSet) -> Gradient:
        hvd = import_horovod()
        op, factor, scales = HOROVOD.reduce_op(self.op), self.predivide, {}
        if isinstance(gradient, tf.IndexedSlices):
            return gather_slices(gradient, name, members, is_sum=op == hvd.Sum)
        if factor != 1.0:
            op, scales = hvd.Sum, {"prescale_factor": 1.0 / factor, "postscale_factor": factor / members.size()}
        # Horovod has no kernel for bfloat16.
        given = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        result = hvd.allreduce(
            given,
            op=op,
            compression=self._horovods or hvd.Compression.none,
            process_set=members,
            name=name,
            ignore_name_scope=True,
            **scales,
        )
        return tf.cast(result, gradient.dtype) if result.dtype != gradient.dtype else result


def _places(gradients: Sequence[Gradient]) -> list[int]:
    return [i for i, gradient in enumerate(gradients) if gradient is not None]


def _replaced(gradients: Sequence[Gradient], places: Sequence[int], results: Sequence[Gradient]) -> list[Gradient]:
    replaced = list(gradients)
    for place, result in zip(places, results, strict=True):
        replaced[place] = result
    return replaced


def _built_step_of(compression: DGCCompressor | None, sums: Sums, indices: Sequence[int] | None) -> Step:
    """Return the function that a graph calls in each step.

    TensorFlow keeps this function until the process ends. So the function must hold neither the compressor nor anything
    as large as the model. The model holds the compressor (:meth:`DGCCompressor.bind`). If ``indices`` is None, the
    function only adds up gradients.
    """
    reference = None if compression is None else weakref.ref(compression)
    adding, several = weakref.ref(sums), sums.passes > 1

    def step(arrays: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        alive = None if reference is None else still_there(reference)
        if several:
            passes = still_there(adding)
            arrays = passes.add(arrays, 0 if alive is None else alive.generation)
            if passes.passed:
                return arrays, ACCUMULATED
        if alive is None or alive.engine is None or indices is None:
            return arrays, APPLY if all(np.isfinite(a).all() for a in arrays) else REFUSED
        return alive.engine.step(indices, arrays, rate, values)

    return step


def _step_ahead_of(compression: DGCCompressor, places: Sequence[tuple[int, bool]]) -> Step:
    """Return the function that exchanges an update. It must not hold the compressor; see :func:`_built_step_of`.

    ``places`` holds the variables that have a gradient, and whether they decay.
    """
    reference = weakref.ref(compression)

    def step(after: list[np.ndarray], rate: float | None, rest: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        engine = still_there(reference).engine
        assert isinstance(engine, StepAheadEngine)
        decay, before = float(rest[0]), rest[1 + len(places) :]
        gradients: list[np.ndarray | None] = [None] * len(after)
        decays = [0.0] * len(after)
        for (index, decays_too), gradient in zip(places, rest[1:], strict=False):
            gradients[index], decays[index] = gradient, decay * decays_too
        assert rate is not None
        return engine.exchange_updates(before, after, gradients, decays, (rate,)), APPLY

    return step


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor | float) -> list[Gradient]:
    """Return gradients times a factor, which is cast to their types."""

    def times(gradient: Gradient) -> Gradient:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(times(gradient.values), gradient.indices, gradient.dense_shape)
        return None if gradient is None else gradient * tf.cast(factor, gradient.dtype)

    return [times(gradient) for gradient in gradients]


# Results of exchanges that the script still holds, by identity.
_results: weakref.WeakValueDictionary[int, tf.Tensor] = weakref.WeakValueDictionary()


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


class HasReducer:
    """A mixin that gives a distributed optimizer its exchange."""

    _dgc_reducer: Reducer

    @property
    def compression(self) -> DGCCompressor | None:
        """The compressor, with this rank's statistics and state; None in dense training."""
        return self._dgc_reducer.compression

    def use_reducer(self, reducer: Reducer) -> None:
        """Set the reducer of this optimizer's gradients."""
        self._dgc_reducer = reducer

    def bind(self, variables: Sequence[Variable]) -> None:
        """Attach the compressor to the model before the first step. Collective."""
        self._dgc_reducer.bind(variables, without_loss_scale(self))


def reducer_of(optimizer: Optimizer) -> Reducer | None:
    """Return the reducer of dgc's distributed optimizer, also of one inside a LossScaleOptimizer; else None."""
    # Check the class, because a script's own optimizer may have attributes of the same names.
    ours = (o for o in (optimizer, without_loss_scale(optimizer)) if isinstance(o, HasReducer))
    return next((o._dgc_reducer for o in ours), None)
