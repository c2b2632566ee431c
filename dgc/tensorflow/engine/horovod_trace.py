"""Way A: what unmodified Horovod calls while it builds the graph of its allreduces.

Horovod calls ``compress``, its own allreduce and ``decompress`` for one variable after the other, each inside a
``tf.cond``; with ``groups=1`` for all together inside one. Those must run in the same order on all ranks, so each
waits for the one before, and a ``decompress`` must never wait for a ``compress`` that comes later in the graph. Here
the first ``decompress`` of a group crosses to the core with the gradients of all variables that were compressed since
the last one: without groups that is one variable, with ``groups=1`` the whole model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.adapter.horovod import check_stand_in
from dgc.errors import ConfigError, LayoutError
from dgc.tensorflow.engine.engine import DENSE, NONE, SPARSE, Engine
from dgc.tensorflow.engine.group import Group
from dgc.tensorflow.engine.numpy_bridge import APPLY, GONE, REFUSED, Step, cross
from dgc.tensorflow.engine.optimizers import family, learning_rate
from dgc.tensorflow.engine.tensors import raw_variable


@dataclass
class _Pending:
    """A gradient between ``compress`` and ``decompress``."""

    index: int
    gradient: tf.Tensor
    variable: Any
    group: list[_Pending] = field(default_factory=list)
    result: tf.Tensor | None = None


@dataclass
class _Call:
    """What the frames above tell about Horovod's call; variables and gradients are in the same order."""

    variables: list[Any]
    gradients: list[Any]
    optimizer: Any
    process_set: Any
    has_local: bool


class Stock:
    """Stands between Horovod's tracing and the engine of one compressor."""

    def __init__(self, compressor: Any) -> None:
        """Serve ``compressor`` (a :class:`~dgc.tensorflow.compressor.DGCCompressor`)."""
        self._compressor = compressor
        self._waiting: list[_Pending] = []
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="dgc_turn")

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, _Pending]:
        """Remember a gradient; Horovod reduces a one-element stand-in.

        Raises:
            ConfigError: another process set than the compressor's, or the caller is no Horovod class for TensorFlow.
            LayoutError: a gradient of a variable that the compressor was not built for.
        """
        engine = self._engine()
        call = _horovods_call()
        if call.process_set is not None:
            self._compressor.require_same_set(call.process_set)
        place = next((i for i, g in enumerate(call.gradients) if g is tensor), None)
        if place is None:
            raise ConfigError(
                "Horovod passed a gradient of which the compressor cannot tell the variable (sparse_as_dense, "
                "op=Adasum or backward_passes_per_step may have copied it); use the wrappers of dgc.tensorflow"
            )
        self._settle(engine, call)
        variable = call.variables[place]
        index = engine.index_of(variable)
        assert index is not None, "_settle() has refused foreign variables"
        pending = _Pending(index, tensor, raw_variable(variable))
        self._rate = None
        if engine.adoption.rate_is_known:
            self._rate = learning_rate(call.optimizer or engine.adoption.optimizer)
        if self._waiting and self._waiting[0].gradient.graph is not tensor.graph:
            # An earlier trace was given up half-way.
            self._waiting = []
        self._waiting.append(pending)
        return tf.ones([1], tf.float32), pending

    def decompress(self, stand_in: tf.Tensor, ctx: _Pending) -> tf.Tensor:
        """Return the exchanged gradient; the first call of a group builds the crossing for all of it.

        Raises:
            DGCError: see :meth:`dgc.tensorflow.engine.engine.Engine.group`.
        """
        if not ctx.group:
            members = sorted(self._waiting, key=lambda p: p.index)
            self._waiting = []
            for member in members:
                member.group = members
            self._cross(members, stand_in)
        assert ctx.result is not None
        return ctx.result

    # -- inside --------------------------------------------------------------------------------------------------

    def _engine(self) -> Engine:
        engine = self._compressor.engine
        assert engine is not None, "the compressor has refused to be called unbound"
        return engine

    def _settle(self, engine: Engine, call: _Call) -> None:
        kinds = [NONE] * len(engine.variables)
        for variable, gradient in zip(call.variables, call.gradients, strict=True):
            index = engine.index_of(variable)
            if index is None:
                name = getattr(variable, "name", "?")
                raise LayoutError(
                    f"Horovod passed a gradient of {name!r}, which the compressor was not built for: another model, or "
                    "a variable that was added later; residuals cannot be shared: build one compressor for each model"
                )
            if gradient is not None:
                kinds[index] = SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE
        engine.adoption.follow(call.optimizer)
        if call.has_local:
            self._compressor.stand_beside_local()
        engine.take_momentum()
        engine.settle(kinds)

    def _cross(self, members: Sequence[_Pending], stand_in: tf.Tensor) -> None:
        engine = self._engine()
        indices = engine.group([m.index for m in members]).indices
        # The first values of a variable are looked at in every step: Horovod uses a graph again for another model with
        # variables of the same shapes.
        probe = tf.reshape(tf.convert_to_tensor(members[0].variable), [-1])[:_PROBED]
        values = [m.variable for m in members] if engine.needs_parameters() else []
        count = len(members)

        step = _step_of(self._compressor, indices)
        given = [*(m.gradient for m in members), stand_in, tf.cast(probe, tf.float32)]
        # TensorFlow orders what changes the same variable, and nothing else: without this, ranks would exchange their
        # variables in different orders. Horovod's stand-ins wait in line as well.
        with tf.control_dependencies([self._turn.assign_add(1)]):
            results, _ = cross(step, given, self._rate, values)
        for member, result in zip(members, results[:count], strict=True):
            member.result = result


def _step_of(compressor: Any, indices: Sequence[int]) -> Step:
    """What the graph calls in each step; it must not hold the compressor, because TensorFlow never lets go of it."""
    alive, count = weakref.ref(compressor), len(indices)

    def step(arrays: list[np.ndarray], rate: float | None, extra: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        held = alive()
        if held is None:
            raise ConfigError(GONE)
        engine: Engine = held.engine
        group = engine.group(indices)
        *gradients, sum_of_ones, probed = arrays[: count + 2]
        _check(engine, group, probed, float(sum_of_ones[0]), held.config.op)
        parameters: Sequence[Any] = extra or [None] * count  # type: ignore[list-item]
        engine.take_momentum()
        engine.dense_for = "Horovod's own classes hand the results over"
        follows = engine.adoption.velocity_has_learning_rate
        results, refused = group.run(gradients, parameters, engine.adoption.hyper, rate, follows)
        group.exchange.stats.add_sent(sum_of_ones.nbytes * count)
        # Horovod's allreduce of a variable has no second output: the stand-ins go back as they came.
        back = [*results, np.asarray(sum_of_ones, np.float32), np.asarray(probed, np.float32)]
        return back, REFUSED if refused else APPLY

    return step


def _check(engine: Engine, group: Group, probed: np.ndarray, value: float, op: str) -> None:
    # All ranks that still train see the same stand-in; one that has joined could not be told anything.
    check_stand_in(value, op=op, size=engine.transport.size)
    own = engine.variables[group.indices[0]]
    expected = np.asarray(own).reshape(-1)[: probed.size].astype(np.float32)
    if not np.array_equal(expected, probed, equal_nan=True):
        group.fail(
            ConfigError(
                "Horovod runs this compressor for another model, whose variables have the same shapes; residuals "
                "cannot be shared: build one compressor for each model and optimizer"
            )
        )


_PROBED = 16

_LOCAL = ("_local_sources", "_local_vars")
"""Where Horovod's tapes, and its optimizers and what adds up their passes, keep what stays on its rank."""


def _horovods_call() -> _Call:
    """Find Horovod's list of variables and gradients, which it keeps to itself, in the frames above."""
    frame: FrameType | None = sys._getframe(2)
    variables = gradients = owner = process_set = None
    has_local = False
    for _ in range(60):
        if frame is None:
            break
        found = frame.f_locals
        if process_set is None and frame.f_globals.get("__name__") == "horovod.tensorflow":
            process_set = found.get("process_set")
        if variables is None and "allreduce_grads" in frame.f_code.co_name and "vars" in found:
            variables, gradients = list(found["vars"]), list(found["grads"])
        candidate = found.get("self")
        has_local = has_local or _has_local(frame, candidate)
        if variables is not None and owner is None and candidate is not None and family(candidate) is not None:
            owner = candidate
        frame = frame.f_back
    if variables is None or gradients is None:
        raise ConfigError(
            "compress() was called by something else than hvd.DistributedGradientTape or hvd.DistributedOptimizer; use "
            "those, or the wrappers of dgc.tensorflow"
        )
    return _Call(variables, gradients, owner, process_set, has_local)


def _has_local(frame: FrameType, owner: Any) -> bool:
    """Whether one of Horovod's methods is at work for an object of Horovod's that was told of local variables.

    Asked of Horovod's own code only: a script's objects may call something of theirs the same.
    """
    if frame.f_globals.get("__name__", "").partition(".")[0] != "horovod":
        return False
    return any(vars(owner).get(name) for name in _LOCAL) if hasattr(owner, "__dict__") else False
