"""``DGCMomentum``: Paddle's ``DGCMomentumOptimizer`` as an optimizer for both Keras.

It is Keras' plain SGD inside a distributed optimizer whose compressor applies the momentum. Paddle's names and errors
come from :mod:`dgc.contrib.paddle`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.job import Job
from dgc.contrib.paddle import (
    COMPRESSED_TYPES,
    MIN_NUMEL,
    NEVER,
    L1Decay,
    L2Decay,
    PaddleOptions,
    Regularizer,
    as_state_error,
    one_rate,
    require_keys,
    warn_of_one_process,
)
from dgc.core.checks import plain
from dgc.core.collectives import Transport
from dgc.core.saved import is_empty, require_state
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Adoption
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import import_horovod, is_alone
from dgc.tensorflow.reduce import Reducer
from dgc.tensorflow.tensors import describe, raw_variable, unique_names

_PLACE = ("iterations", "learning_rate")  # keys of a state in addition to those of the compressor's state

_NAME = "dgc_momentum"

_IS_LEGACY = tf.keras.optimizers.SGD.__module__.startswith("tf_keras")


def DGCMomentum(
    learning_rate: Any = None,
    momentum: float | None = None,
    rampup_begin_step: int | None = None,
    rampup_step: int = 1,
    sparsity: Sequence[float] = (0.999,),
    use_nesterov: bool = False,
    local_grad_clip_norm: float | None = None,
    num_trainers: int | None = None,
    regularization: Regularizer = None,
    name: str | None = None,
    *,
    lr: Any = None,
    min_numel: int = MIN_NUMEL,
    dtypes: Sequence[str] = COMPRESSED_TYPES,
    exclude: Sequence[str] = (),
    process_set: Any = None,
    transport: Any = "auto",
    **codecs: Any,
) -> Any:
    """Momentum SGD with Deep Gradient Compression, under Paddle's names.

    The optimizer exchanges the local gradients of all ranks when it applies them; do not wrap it in a
    ``DistributedOptimizer``, nor the tape in a ``DistributedGradientTape``. Before ``rampup_begin_step`` it is momentum
    SGD on averaged gradients. From then on every variable of at least ``min_numel`` elements sends its largest
    accumulated entries and keeps the rest for later. One process compresses nothing, and there is a warning.

    The velocity does not contain the learning rate, as in Paddle and PyTorch but not in Keras' SGD, so a change of the
    learning rate acts at once. A variable without a gradient (None) does not change, as in Keras. Under the policy
    mixed_float16 the optimizer is a LossScaleOptimizer itself and all ranks skip the same steps.

    docs/elsewhere.md has a table of the arguments.

    Returns:
        A Keras optimizer with the additional methods of :class:`PaddleOptimizer`, and the compressor as its attribute
        ``compression``. It belongs to ``tf_keras`` if TF_USE_LEGACY_KERAS=1, else to Keras 3.

    Raises:
        ArgumentError: (an AssertionError, as in Paddle) an argument has a value that Paddle refuses, too.
        ConfigError: (a ValueError) another option is out of range.
        TypeError: ``rampup_begin_step`` is missing, or an option is unknown.

    Source: PaddlePaddle 1.6, ``DGCMomentumOptimizer``; Lin et al. 2018, arXiv 1712.01887.
    """
    arguments = {**locals(), **codecs, "learning_rate": one_rate(learning_rate, lr)}
    del arguments["codecs"], arguments["lr"]
    mixed = not _IS_LEGACY and tf.keras.config.dtype_policy().name == "mixed_float16"
    return (_MomentumLossScale if mixed else _Momentum)(**arguments)


class _Settings(Reducer):
    """The reducer of :func:`DGCMomentum`. It keeps that function's arguments, so that they are saved with a model."""

    compression: MomentumCompressor

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import_horovod(initialized=False)
        self._arguments, given = dict(arguments), dict(arguments)
        names, lost = given.pop("names", ()), given.pop("lost", ())
        compressor = MomentumCompressor(**given)
        compressor.names = names
        super().__init__(compressor, process_set=given["process_set"], lost=lost)

    def to_config(self) -> dict[str, Any]:
        """Return the arguments as plain values, without the learning rate and the name."""
        given = {k: v for k, v in self._arguments.items() if k not in ("learning_rate", "name", "process_set")}
        lost = [*self.lost, *(["process_set"] if self.process_set is not None else [])]
        if not isinstance(given["transport"], str):
            given["transport"] = "auto"
            lost.append("transport")
        return {**_plain(given), "names": self.compression.variable_names(), "lost": lost}


class PaddleOptimizer:
    """The methods of ``DGCMomentum`` that Keras' optimizers do not have."""

    compression: Any
    iterations: Any
    learning_rate: Any
    name: str

    def minimize(self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None, name: str | None = None) -> None:
        """Make one step: compute this rank's gradients, exchange them, update the variables.

        Args:
            loss: a function of no arguments that returns the loss; or the loss, with the tape that has recorded it.
            var_list: the variables, or a function that returns them; the same variables in every step.
            tape: the tape that has recorded the loss.
            name: has no effect; it exists because legacy Keras has it.

        Raises:
            ConfigError: ``loss`` is a tensor and there is no tape.
            DGCError: ranks or steps differ, or a rank failed.
        """
        if not callable(loss) and tape is None:
            raise ConfigError("minimize got a loss without its tape: pass tape=, or a function that computes the loss")
        if callable(loss):
            with tape or tf.GradientTape() as recording:
                loss = loss()
            tape = recording
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        assert tape is not None
        gradients = tape.gradient(loss, list(map(raw_variable, variables)))
        self.apply_gradients(zip(gradients, variables, strict=True))  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state. Call ``compression.average(self)`` on all ranks before, and save one rank's.

        Returns:
            ``"parameters"``: by variable name ``"u"`` (the momentum buffer) and, if compressed, ``"v"`` (the residual),
            1-D; empty before the first step. ``"step"``, ``"size"``, ``"iterations"``. ``"learning_rate"`` unless it is
            a schedule.

        Raises:
            LayoutError: the state may differ between ranks.
        """
        state = self.compression.state_dict()
        state["iterations"] = int(tf.convert_to_tensor(self.iterations))
        if isinstance(self.compression.options.learning_rate, float):
            state["learning_rate"] = float(tf.convert_to_tensor(self.learning_rate))
        return state

    def load_state_dict(self, state: Any) -> None:
        """Continue from a result of :meth:`state_dict`, of a job of any size. Call it on all ranks.

        Before the first step, the compressor keeps its part of the state and loads it in that step. A state from before
        the first step, or an empty dict, clears momentum and residuals.

        Raises:
            StateError: (an AssertionError and a ValueError) the state belongs to another model, or the ranks' states
                differ.
        """
        bare = {k: v for k, v in state.items() if k not in _PLACE} if isinstance(state, Mapping) else state
        self.compression.load_state_dict(bare)
        if "iterations" in state:
            self.iterations.assign(int(state["iterations"]))
        if "learning_rate" in state and isinstance(self.compression.options.learning_rate, float):
            self.learning_rate = state["learning_rate"]

    set_dict = load_state_dict  # Paddle's name

    def get_config(self) -> dict[str, Any]:
        """Return the values from which :meth:`from_config` builds the optimizer again."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        settings = config.pop("settings")
        inner = config.pop("inner") if _IS_LEGACY else config.pop("inner_optimizer")["config"]
        return {**config, "name": self.name, "learning_rate": inner["learning_rate"], **settings}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Build the saved optimizer. The compressor begins with an empty state."""
        config = {"process_set": None, **config}
        config.pop("is_legacy_optimizer", None)
        if isinstance(config["learning_rate"], dict):
            load = tf.keras.optimizers.schedules.deserialize
            config["learning_rate"] = load(config["learning_rate"], custom_objects=custom_objects)
        return cls(**config)


def _plain(value: Any) -> Any:
    """Convert a value for JSON: a regulariser to a dict, a sequence to a list, a NumPy number to a number."""
    if isinstance(value, (L1Decay, L2Decay)):
        return {"kind": type(value).__name__, "coefficient": value.regularization_coeff}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else plain(value)


def _regularizer(value: Any) -> Any:
    """Make the regulariser that a saved model's mapping describes; return other values unchanged."""
    kinds = {"L1Decay": L1Decay, "L2Decay": L2Decay}
    known = isinstance(value, Mapping) and value.get("kind") in kinds
    return kinds[value["kind"]](value["coefficient"]) if known else value


class FixedMomentum(Adoption):
    """An adoption that takes nothing: momentum and regularisation are arguments of ``DGCMomentum``."""

    def __init__(self, options: PaddleOptions, optimizer: Any) -> None:
        self._by_sign = isinstance(options.regularization, L1Decay)
        super().__init__(optimizer, options.to_config([]))

    def decayed(self, index: int, variable: Any) -> Any:
        """Return the x of the core's weight decay, G = clip(g) + c * x: the variable, or its sign for L1."""
        raw = raw_variable(variable)
        return tf.sign(raw) if self._by_sign else raw


class MomentumCompressor(DGCCompressor):
    """The compressor inside ``DGCMomentum``. It follows Paddle's rules about which tensors are compressed.

    Attributes:
        options: Paddle's arguments.
    """

    def __init__(self, regularization: Any, process_set: Any, transport: Any, **given: Any) -> None:
        super().__init__({"process_set": process_set, "transport": transport})
        named = {f.name: given.pop(f.name) for f in dataclasses.fields(PaddleOptions) if f.name in given}
        self.options = PaddleOptions(**named, regularization=_regularizer(regularization), codecs=given)
        self.config = self.options.to_config([])
        self.given_options["sparsity"] = self.options.sparsity  # Paddle's default is meant
        if is_alone(process_set) is not None and self.process_set().included():
            self.options.check_ranks(self.process_set().size())

    def adopt(self, optimizer: Any, process_set: Any = None, *, steps_ahead: bool = False) -> None:
        """Do nothing, because the momentum is an argument."""

    @override
    def needs_engine(self, job: Job) -> bool:
        return True  # even in one process, nothing else applies the momentum

    @override
    def open_engine(self, variables: list[Any], optimizer: Any, transport: Transport, process_set: Any) -> Engine:
        names = self.names if len(self.names) == len(variables) else unique_names(variables)

        def build() -> dict[str, Any]:
            self.options.check_ranks(transport.size)
            rate = self.options.learning_rate
            # The constructor may refuse an optimizer that clips; an error raised here reaches all ranks.
            self.adoption = FixedMomentum(self.options, optimizer)
            shown = rate if isinstance(rate, float) else "a schedule"
            return {"learning_rate": shown, "regularization": repr(self.options.regularization)}

        agree_or_raise(transport, build, "arguments", advice="Give every rank the same arguments and the same model.")
        described = [describe(n, raw_variable(v)) for n, v in zip(names, variables, strict=True)]
        config = self.options.to_config(described)
        if transport.size == 1:
            warn_of_one_process()
            config = dataclasses.replace(config, rampup_begin_step=NEVER)
        assert self.adoption is not None
        return Engine(variables, config, transport, self.adoption, 1.0, names=names)

    @override
    def fitting_state(self, state: Any) -> Mapping[str, Any]:
        with as_state_error():
            require_state(state)
            if self.engine is not None and not is_empty(state):
                require_keys(state, ("parameters", "step", "size", "format"))
            return super().fitting_state(state)

    @override
    def load_state_dict(self, state: Any) -> None:
        with as_state_error():
            super().load_state_dict(state)


if _IS_LEGACY:
    import tf_keras

    from dgc.tensorflow.keras.legacy import Distributed

    @tf_keras.saving.register_keras_serializable(package="dgc", name="DGCMomentum")
    class _Momentum(PaddleOptimizer, Distributed, tf_keras.optimizers.SGD):
        """DGCMomentum for legacy Keras, whose LossScaleOptimizer exchanges gradients before it looks at them."""

        def __init__(self, **arguments: Any) -> None:
            settings = _Settings(arguments)
            options = settings.compression.options
            tf_keras.optimizers.SGD.__init__(self, options.learning_rate, name=options.name or _NAME)
            self.use_reducer(settings)

else:
    import keras

    from dgc.tensorflow.keras.keras3 import DistributedLossScaleOptimizer, DistributedOptimizer

    class _OverSGD(PaddleOptimizer):
        def __init__(self, arguments: dict[str, Any], **others: Any) -> None:
            settings = _Settings(arguments)
            options = settings.compression.options
            inner: Any = keras.optimizers.SGD(options.learning_rate)
            super().__init__(inner, settings, name=options.name or _NAME, **others)  # type: ignore[call-arg]

    @keras.saving.register_keras_serializable(package="dgc", name="DGCMomentum")
    class _Momentum(_OverSGD, DistributedOptimizer):  # type: ignore[no-redef]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(arguments)

    @keras.saving.register_keras_serializable(package="dgc", name="DGCMomentumLossScale")
    class _MomentumLossScale(_OverSGD, DistributedLossScaleOptimizer):
        """DGCMomentum for the policy mixed_float16: it scales losses, and all ranks skip the same steps."""

        def __init__(self, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000, **arguments: Any) -> None:
            super().__init__(arguments, initial_scale=initial_scale, dynamic_growth_steps=dynamic_growth_steps)
