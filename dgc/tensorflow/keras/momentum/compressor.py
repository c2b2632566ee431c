"""What ``DGCMomentum`` is made of below Keras: a compressor with Paddle's options, and the reducer that feeds it.

The optimizers in :mod:`dgc.tensorflow.keras` add how each Keras calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.adapter.engine import is_empty
from dgc.adapter.paddle import (
    L1Decay,
    PaddleOptions,
    Regularizer,
    StateError,
    as_state_error,
    check_regularizer,
    coefficients,
    config_for,
    flat,
    require_keys,
    shaped,
    sparse_refusal,
)
from dgc.core.config import require_number
from dgc.core.transport import Transport
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.adoption import Adoption
from dgc.tensorflow.engine.engine import Engine
from dgc.tensorflow.engine.horovod import is_alone
from dgc.tensorflow.engine.optimizers import clipping, get_momentum, is_sgd
from dgc.tensorflow.engine.tensors import Variable, describe, raw_variable, unique_names
from dgc.tensorflow.reduce.reducer import Reducer
from dgc.tensorflow.reduce.step import Context, Gradient
from dgc.transport.agreement import agree_or_raise


class FixedMomentum(Adoption):
    """Momentum and regularisation that were given as arguments: nothing is taken from any optimizer."""

    def __init__(self, options: PaddleOptions, regularizers: Sequence[Regularizer], optimizer: Any) -> None:
        """Take Paddle's options, each variable's regularizer, and the optimizer whose learning rate counts."""
        self._regularizers = list(regularizers)
        super().__init__(optimizer, options.to_config([]))
        self.cover(len(self._regularizers))

    def take(self) -> None:
        """Look whether the optimizer was given what the compressor applies.

        Raises:
            ConfigError: the optimizer was given a momentum beside the one that the compressor applies, or clips.
        """
        self._refuse_clipped_velocity()
        if is_sgd(self.optimizer) and get_momentum(self.optimizer)[0]:
            raise ConfigError(
                "DGCMomentum's momentum is its argument and stays; build a new optimizer for another one, and give it "
                "the old one's state_dict()"
            )

    def _refuse_clipped_velocity(self) -> None:
        clips = clipping(self.optimizer)
        if clips and self._config.momentum:
            raise ConfigError(
                f"the optimizer got {clips}, which would clip DGCMomentum's velocity, not the gradient: leave it out, "
                "and give DGCMomentum local_grad_clip_norm= (and num_trainers=) instead"
            )

    def cover(self, count: int) -> None:  # noqa: D102
        super().cover(count)
        if count == len(self._regularizers):
            self.hyper.weight_decay = [max(coefficients(regularizer)) for regularizer in self._regularizers]

    def decayed(self, index: int, variable: Any) -> Any:
        """X in G = clip(g) + c * x, where the core adds weight decay: the variable, or its sign for L1."""
        raw = raw_variable(variable)
        return tf.sign(raw) if isinstance(self._regularizers[index], L1Decay) else raw


class MomentumCompressor(DGCCompressor):
    """The compressor inside ``DGCMomentum``: Paddle's rules about what is compressed, and its own momentum.

    Attributes:
        options: Paddle's arguments.
    """

    works_alone = True

    def __init__(
        self,
        options: PaddleOptions,
        parameter_regularization: Mapping[str, Regularizer] | None = None,
        parameter_learning_rate: Mapping[str, float] | None = None,
        process_set: Any = None,
        transport: Any = "auto",
    ) -> None:
        """Check what needs no other rank; arguments as in :func:`~dgc.tensorflow.keras.momentum.optimizer.DGCMomentum`.

        Raises:
            ArgumentError: a regulariser of another kind, or ``num_trainers`` is not the number of ranks.
            ConfigError: a factor is no finite number >= 0.
        """
        super().__init__({"process_set": process_set, "transport": transport})
        self.options = options
        self.parameter_regularization = dict(parameter_regularization or {})
        for pattern, regularizer in self.parameter_regularization.items():
            check_regularizer(regularizer, f"parameter_regularization[{pattern!r}]")
        self.parameter_learning_rate = dict(parameter_learning_rate or {})
        for pattern, factor in self.parameter_learning_rate.items():
            require_number(f"parameter_learning_rate[{pattern!r}]", factor, low=0.0)
        self.config = options.to_config([])
        self._compressed: set[int] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        if is_alone(process_set) is not None and self.process_set().included():
            options.check_ranks(self.process_set().size())

    def adopt(self, optimizer: Any, process_set: Any = None) -> None:
        """Nothing is adopted: the momentum is this compressor's own argument."""

    def _open_engine(self, variables: list[Any], optimizer: Any, transport: Transport, process_set: Any) -> Engine:
        """Make the engine; with one process, too, where nothing else would apply the momentum.

        Raises:
            ArgumentError: ``num_trainers`` is not the number of ranks.
            ConfigError: ranks differ in an argument.
        """
        names = unique_names(variables)

        def build() -> dict[str, Any]:
            self.options.check_ranks(transport.size)
            rate = self.options.learning_rate
            # Here, where an error of one rank is raised on all: it refuses an optimizer that clips.
            self.adoption = FixedMomentum(self.options, [self._regularizer_of(name) for name in names], optimizer)
            chosen = {name: f"{self._regularizer_of(name)!r} learning_rate*{self._factor_of(name)}" for name in names}
            return {"learning_rate": rate if isinstance(rate, float) else "a schedule", **chosen}

        agree_or_raise(transport, build, "arguments", advice="Give every rank the same arguments and the same model.")
        described = [describe(n, raw_variable(v)) for n, v in zip(names, variables, strict=True)]
        config, self._compressed = config_for(self.options, described, transport.size)
        self._shapes = {parameter.name: parameter.shape for parameter in described}
        assert self.adoption is not None
        return Engine(variables, config, transport, self.adoption, 1.0)

    def densified(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Sparse gradients of variables that are sent dense, as tensors; call it after :meth:`bind`.

        Raises:
            ConfigError: a sparse gradient of a compressed variable. All ranks get it.
        """
        engine = self.engine
        assert engine is not None
        result = list(gradients)
        for place, (gradient, index) in enumerate(zip(gradients, engine.indices(variables), strict=True)):
            if not isinstance(gradient, tf.IndexedSlices):
                continue
            if index in self._compressed:
                engine.fail(sparse_refusal(engine.names[index]))
            result[place] = tf.convert_to_tensor(gradient)
        return result

    def in_units_of_the_rate(self, results: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Results times their variables' factors of the learning rate, which no momentum contains."""
        if not self.parameter_learning_rate:
            return list(results)
        if self.engine is None:
            names = unique_names(list(variables))
        else:
            names = [self.engine.names[index] for index in self.engine.indices(variables)]
        scaled = []
        for result, name in zip(results, names, strict=True):
            factor = self._factor_of(name)
            scaled.append(result if result is None or factor == 1.0 else result * tf.cast(factor, result.dtype))
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """This rank's u, v and step, u and v in the variables' shapes; none of them before the first step."""
        if self.engine is None:
            return super().state_dict()
        state = self.engine.state_dict()
        return {**state, "parameters": shaped(state["parameters"], self._shapes)}

    def _require_states(self, state: Any, resize: bool) -> list[Any]:
        with as_state_error():
            return super()._require_states(state, resize)

    def _own(self, states: list[Any], resize: bool) -> dict[str, Any]:
        """This rank's state, made of some in the form of :meth:`state_dict`."""
        assert self.engine is not None
        wide = {
            name: np.dtype(np.float64 if v.dtype == tf.float64 else np.float32)
            for name, v in zip(self.engine.names, self.engine.variables, strict=True)
        }
        if not is_empty(states[0]):
            for state in states:
                require_keys(state, ("parameters", "step", "rank", "size", "format"))
                for name in (name for group in state.get("groups", ()) for name in group["names"]):
                    if name not in state["parameters"]:
                        raise StateError(f"the state lacks parameter {name!r}; it was changed after it was saved")
            # Other names are the engine's business: it knows how Keras renames a loaded model's variables.
            checked = [flat(state["parameters"], self._shapes, wide, flat_too=True) for state in states]
            states = [{**state, "parameters": own} for state, own in zip(states, checked, strict=True)]
        with as_state_error():
            return super()._own(states, resize)

    def _factor_of(self, name: str) -> float:
        return next((f for p, f in self.parameter_learning_rate.items() if fnmatchcase(name, p)), 1.0)

    def _regularizer_of(self, name: str) -> Regularizer:
        for pattern, regularizer in self.parameter_regularization.items():
            if fnmatchcase(name, pattern):
                return regularizer
        return self.options.regularization


class MomentumReducer(Reducer):
    """Feeds a :class:`MomentumCompressor`."""

    compression: MomentumCompressor

    def reduce(
        self,
        gradients: list[Gradient],
        variables: list[Variable],
        context: Context,
    ) -> tuple[list[Gradient], tf.Tensor]:
        """See :func:`dgc.tensorflow.reduce.step.reduce`."""
        self.compression.bind(variables, context.optimizer, self.options.process_set)
        gradients = self.compression.densified(gradients, variables)
        reduced, verdict = super().reduce(gradients, variables, context)
        return self.compression.in_units_of_the_rate(reduced, variables), verdict
