"""Step-ahead error feedback for Keras 3: after each step of the optimizer, exchange what it has changed.

The optimizer steps on the gradient of its own rank, as in a script of one process. :mod:`dgc.core.step_ahead` explains
the law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from typing_extensions import override

from dgc.adapter.agreement import (
    agree_or_raise,
    any_true,
    built_together,
    require_agreement,
    require_replicas,
    sample_places,
    tell_error,
)
from dgc.adapter.step_ahead import EQUAL, StepAheadBase
from dgc.adapter.warm_up import compiled
from dgc.core.kernels import choose_kernels
from dgc.core.message import Disagreement
from dgc.core.step_ahead import StepAhead
from dgc.errors import ConfigError, DGCError
from dgc.tensorflow.adoption import Optimizer, is_keras, optimizer_variables, without_loss_scale
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.tensors import ACCUMULATED, APPLY, REFUSED, ResultPool, as_array, describe, raw_variable


class StepAheadEngine(StepAheadBase, Engine):
    """The variables of one model, their shared values, and the exchange of updates. Construction is collective.

    Attributes:
        is_scaled: whether the optimizer scales its loss. Then :meth:`common_verdict` comes before each of its steps.
    """

    is_scaled = False
    _has_agreed = False  # whether the next collective is the exchange

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of :class:`~dgc.tensorflow.engine.Engine`."""
        super().__init__(*arguments)
        self._differed = False  # whether the variables differed between ranks before the first step
        self.members = tuple(range(len(self.variables)))
        self.ahead = built_together(self.transport, self._build)
        self.exchange = self._exchange = self.ahead.exchange
        self.layout = self.ahead.layout
        shapes = [tuple(v.shape) for v in self.variables]
        self._pool = ResultPool(shapes, [np.float64 if v.dtype == tf.float64 else np.float32 for v in self.variables])
        self._close_when_dropped()

    def _build(self) -> StepAhead:
        return StepAhead(
            [describe(n, v) for n, v in zip(self.names, self.variables, strict=True)],
            self._config,
            self.between,
            compiled(self._config, lambda: choose_kernels("cpu"), lambda chosen: chosen),
            rescales=not is_keras(self.adoption.optimizer, "SGD"),
            rounding=self._rounding,
        )

    def _rounding(self, index: int) -> Callable[[np.ndarray], np.ndarray] | None:
        dtype = self.variables[index].dtype
        own = dtype.as_numpy_dtype
        return None if dtype in (tf.float32, tf.float64) else lambda values: values.astype(own).astype(values.dtype)

    # -- a step --------------------------------------------------------------------------------------------------------

    def common_verdict(self, verdict: int) -> int:
        """Return REFUSED on all ranks if the gradients of any rank overflow, as in dense training. Collective.

        So all ranks have the same loss scale, and the same number of steps for a learning rate schedule.
        """
        self.require_open("apply()")
        if verdict == ACCUMULATED:  # on all ranks
            return verdict
        overflows = any_true(self.between, verdict == REFUSED)
        self._has_agreed = True
        return REFUSED if overflows else verdict

    def exchange_updates(
        self,
        before: Sequence[np.ndarray],
        after: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray | None],
        decays: Sequence[float],
        rates: tuple[float, ...],
        joins: int = 0,
    ) -> list[np.ndarray]:
        """Exchange what a step of the optimizer has changed.

        Args:
            before: the variables' values before the step.
            after: their values after it.
            gradients: this rank's gradients, or None where a variable has none.
            decays: for each variable, the share of it that the optimizer has taken off as weight decay.
            rates: the learning rate, which must be equal on all ranks; empty without an optimizer.
            joins: flags of a rank that takes part without data.

        Returns:
            The variables' new values.
        """
        try:
            self.require_open("apply()")
            with self._told():
                results = [self._pool.take(i) for i in range(len(after))]
                values = [result.reshape(-1) for result in results]
                _copy(before, values)
            if not self.ahead.shared and not self._start(values):
                _copy(after, values)
                return results
            with self._told():
                edited = self.ahead.is_edited(values)
                _copy(after, values)
                flat = [None if g is None else np.asarray(as_array(g), np.float32) for g in gradients]
            try:
                self.ahead.step(
                    values, flat, decays, values, values, edited=edited, joins=joins, learning_rates=rates,
                )  # fmt: skip
            except Exception as error:
                self._write(values)  # as before the step, which no rank has taken
                if not isinstance(error, Disagreement):
                    raise
                shown: dict[str, object] = {"learning_rate": [float(f"{rate:.5e}") for rate in rates]}
                require_agreement(self.transport, shown, "the optimizer's options", advice=EQUAL)
                raise
            self._require_all_ended()
            if joins:
                return results
            self._after_step()
            self._warn_of_edits()
            if self.exchange.state.step == self._config.steps:  # the training ends
                self.ahead.average(values)
            return results
        finally:
            self._has_agreed = False

    def _start(self, values: Sequence[np.ndarray]) -> bool:
        """Make the values the shared ones, if they are equal on all ranks. Collective.

        Keras may broadcast the variables after the first step. So in that step return False if the ranks differ.
        After an error the model has these values, which are those before the optimizer's step.
        """
        self._write(values)
        agree_or_raise(self.transport, self.adoption.constant_options, "the optimizer's options", advice=EQUAL)
        try:
            require_replicas(
                self.transport,
                {n: p[sample_places(p.size)] for n, p in zip(self.names, values, strict=True)},
                "add dgc.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of fit(), and load a model on "
                "all ranks",
                sums=[int(p.view(np.uint32).sum(dtype=np.uint64)) % 2**52 for p in values],
            )
        except ConfigError:
            if self._differed:
                raise
            self._differed = True
            self.exchange.state.step += 1
            return False
        self._left_at = self.adoption.steps - 1  # the optimizer has made this step already
        self._warn_of_loss()
        self.ahead.start(values)
        return True

    def identity(self) -> list[Any]:
        """Return values that are equal on all ranks of this engine."""
        return [self.exchange.state.step, self.names]

    def average(self, optimizer: Any = None) -> None:
        """Make the variables equal on all ranks, and those of ``optimizer`` if it is given. Collective."""
        self.require_open("average()")
        self.require_between_steps("average()", whole=True)
        if self.is_scaled:
            self.common_verdict(APPLY)
            self._has_agreed = False
        if not self.ahead.shared:  # there was no step
            return
        self.meet("average()" if optimizer is None else "average(optimizer)")
        values = built_together(self.transport, self._values)
        self.ahead.average(values)
        self._write(values)
        for variable in _slots(without_loss_scale(optimizer)):
            mean = np.array(as_array(variable), np.float32)
            self.between.allreduce(mean, "sum")
            mean /= np.float32(self.between.size)
            variable.assign(tf.cast(mean.reshape(variable.shape), variable.dtype))
        if optimizer is not None:
            self.exchange.state.is_equal = True

    @override
    def exchange_nothing(self, flags: int) -> None:
        if self.is_scaled:
            self.common_verdict(APPLY)
        if self.ahead.shared:
            values = [np.asarray(v) for v in self.variables]
            self.exchange_updates(values, values, [None] * len(values), [0.0] * len(values), (), flags)

    @override
    def fail(self, error: DGCError) -> NoReturn:
        awaits_verdict = self.is_scaled and not self._has_agreed
        if awaits_verdict or not self.ahead.shared:  # the others wait in any_true() or _start()
            tell_error(self.transport, error)
            raise error
        super().fail(error)

    @override
    def begin_anew(self, forget: bool) -> None:
        super().begin_anew(forget)
        if forget:
            self.ahead.restart()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _values(self) -> list[np.ndarray]:
        values = [self._pool.take(i).reshape(-1) for i in self.members]
        _copy(self.variables, values)
        return values

    def _write(self, values: Sequence[np.ndarray]) -> None:
        for variable, p in zip(self.variables, values, strict=True):
            variable.assign(tf.cast(tf.constant(p.reshape(variable.shape)), variable.dtype))
        if self._seen:
            self.remember()  # this is no load

    # -- state ---------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self, own: bool = False) -> dict[str, Any]:
        """Return the state, with the names of the variables, because Keras renames those of a loaded model."""
        return {**super().state_dict(), "names": self.names}

    @override
    def _find_edited(self) -> list[bool]:
        return self.ahead.find_edited(self._values())

    @override
    def _clear(self) -> None:
        super()._clear()
        if self.ahead.shared:
            values = self._values()
            self.ahead.restart(values, self._loaded)  # the next step compares the ranks' variables again
            self._write(values)


def _slots(optimizer: Optimizer) -> list[Any]:
    """Return the optimizer's variables that hold gradients' traces: neither its rate nor its number of steps."""
    rate = raw_variable(getattr(optimizer, "learning_rate", None))
    found = map(raw_variable, optimizer_variables(optimizer))
    return [v for v in found if v.dtype.is_floating and v is not rate]


def _copy(arrays: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for array, p in zip(arrays, values, strict=True):
        p[...] = as_array(array)
