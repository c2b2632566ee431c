"""``DGCMomentum``: Paddle's ``DGCMomentumOptimizer`` as an optimizer of whichever Keras is in use.

It is Keras' plain SGD behind a distributed optimizer whose compressor holds the momentum. Paddle's names and refusals
come from :mod:`dgc.adapter.paddle`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.paddle import (
    COMPRESSED_TYPES,
    MIN_NUMEL,
    ExchangeMethods,
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
from dgc.core.saved import is_empty
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Adoption
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.horovod import import_horovod, is_alone
from dgc.tensorflow.reduce import ReduceOptions, Settings
from dgc.tensorflow.tensors import describe, raw_variable, unique_names

_PLACE = ("iterations", "learning_rate")
"""What a state holds beside the compressor's."""

_NAME = "dgc_momentum"

_NEVER = 2**62
"""A first compressed step that no run reaches."""

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
    accumulated entries and keeps the rest for later.

    The velocity does not contain the learning rate, as in Paddle and PyTorch and unlike in Keras' SGD, so a change of
    the learning rate acts at once. A variable without a gradient (None) is left alone, as Keras does. Under the policy
    mixed_float16 the optimizer is a LossScaleOptimizer itself and all ranks skip the same steps.

    With one process nothing is compressed, whatever the step: that would only delay updates. Paddle refuses to run
    then; here it is a warning, so that a script can be tried out without a launcher.

    Args:
        learning_rate: the step size: a number or a Keras schedule.
        momentum: the momentum factor, in [0, 1).
        rampup_begin_step: the first compressed step, counted from 0.
        rampup_step: steps over which ``sparsity`` is walked through.
        sparsity: shares of entries held back, each for an equal part of the ramp-up; the last one stays.
        use_nesterov: Nesterov momentum.
        local_grad_clip_norm: c; the local gradient of a compressed variable is scaled down to an L2 norm of
            c * sqrt(P).
        num_trainers: P; needed for clipping, and checked.
        regularization: ``L1Decay(c)``, ``L2Decay(c)`` or None.
        name: of the optimizer.
        lr: another name for ``learning_rate``.
        min_numel: smaller variables are sent dense.
        dtypes: names of the types that are compressed.
        exclude: name patterns (fnmatch) of variables that are sent dense.
        process_set: the Horovod process set to average over; None means all ranks.
        transport: "auto", "mpi", "horovod" or a transport.
        **codecs: ``indices="elias_fano"``, ``values="float32"``, ``bucket_bytes=25 MiB``, ``momentum_masking=None``.

    Returns:
        A Keras optimizer (of Keras 3, or of ``tf_keras`` where TF_USE_LEGACY_KERAS=1) with the further methods of
        :class:`PaddleOptimizer`.

    Raises:
        ArgumentError: (an AssertionError) what Paddle asserts: missing learning rate or momentum, a negative
            ``rampup_begin_step``, a clipping norm that is no float, ``num_trainers`` missing for it or not the number
            of ranks, a regulariser of another kind.
        ConfigError: (a ValueError) another option out of range.
        TypeError: ``rampup_begin_step`` is missing, or an unknown option.

    Source: PaddlePaddle 1.6, ``DGCMomentumOptimizer``; Lin et al. 2018, arXiv 1712.01887.
    """
    arguments = {**locals(), **codecs, "learning_rate": one_rate(learning_rate, lr)}
    del arguments["codecs"], arguments["lr"]
    mixed = not _IS_LEGACY and tf.keras.config.dtype_policy().name == "mixed_float16"
    return (_MomentumLossScale if mixed else _Momentum)(**arguments)


class _Settings(Settings):
    """The arguments of :func:`DGCMomentum`, without ``lr``, or those of a saved model; and their reducer."""

    compression: MomentumCompressor

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import_horovod(initialized=False)
        self._arguments, given = dict(arguments), dict(arguments)
        names, lost = given.pop("names", ()), given.pop("lost", ())
        compressor = MomentumCompressor(**given)
        compressor._names = names
        super().__init__(compressor, ReduceOptions(process_set=given["process_set"]), lost=lost)

    def to_config(self) -> dict[str, Any]:
        """The arguments in plain values, but for the learning rate and the name."""
        given = {k: v for k, v in self._arguments.items() if k not in ("learning_rate", "name", "process_set")}
        lost = [*self.lost, *(["process_set"] if self.process_set is not None else [])]
        if not isinstance(given["transport"], str):
            given["transport"] = "auto"
            lost.append("transport")
        return {**_plain(given), "names": self.compression.variable_names(), "lost": lost}


class PaddleOptimizer(ExchangeMethods):
    """What ``DGCMomentum`` has beside Keras' methods."""

    compression: Any
    iterations: Any
    learning_rate: Any
    name: str

    def minimize(self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None, name: str | None = None) -> None:
        """One whole iteration: compute this rank's gradients, exchange them, update the variables.

        Args:
            loss: a function of no arguments that returns the loss; or the loss, with the tape that has recorded it.
            var_list: the variables, or a function that returns them; the same ones in every step.
            tape: of the loss.
            name: accepted as in legacy Keras.

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
        gradients = tape.gradient(loss, [getattr(v, "_value", v) for v in variables])
        self.apply_gradients(zip(gradients, variables, strict=True))  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as copies: it differs between ranks, so save one per rank and never broadcast it.

        Returns:
            ``"parameters"``: by variable name ``"u"`` (the momentum buffer) and, where compressed, ``"v"`` (what was
            not sent yet), 1-D; ``"step"``, ``"rank"``, ``"size"``, ``"iterations"``, and
            ``"learning_rate"`` where it is no schedule. Without parameters before the first step.
        """
        state = self.compression.state_dict()
        state["iterations"] = int(tf.convert_to_tensor(self.iterations))
        if isinstance(self.compression.options.learning_rate, float):
            state["learning_rate"] = float(tf.convert_to_tensor(self.learning_rate))
        return state

    def load_state_dict(self, state: Any, resize: bool = False) -> None:
        """Continue from a saved state; call it on all ranks. Before the first step it is kept until then.

        A state from before the first step, or an empty dict, forgets momentum and residuals.

        Args:
            state: what :meth:`state_dict` returned on this rank; with ``resize=True`` a list of all old ranks'.
            resize: redistribute the state of N old ranks to this job's M ranks, so that the mean residual is kept.

        Raises:
            StateError: (an AssertionError and a ValueError) it belongs to another model, rank or number of ranks.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        bare = [{k: v for k, v in s.items() if k not in _PLACE} for s in states]
        self.compression.load_state_dict(bare[0] if isinstance(state, Mapping) else bare, resize)
        if "iterations" in states[0]:
            self.iterations.assign(int(states[0]["iterations"]))
        if "learning_rate" in states[0] and isinstance(self.compression.options.learning_rate, float):
            self.learning_rate = states[0]["learning_rate"]

    set_dict = load_state_dict
    """Paddle's name."""

    def get_config(self) -> dict[str, Any]:
        """All that :meth:`from_config` needs."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        settings = config.pop("settings")
        inner = config.pop("inner") if _IS_LEGACY else config.pop("inner_optimizer")["config"]
        return {**config, "name": self.name, "learning_rate": inner["learning_rate"], **settings}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Build it as it was saved; the compressor begins with an empty state."""
        config = {"process_set": None, **config}
        config.pop("is_legacy_optimizer", None)
        if isinstance(config["learning_rate"], dict):
            load = tf.keras.optimizers.schedules.deserialize
            config["learning_rate"] = load(config["learning_rate"], custom_objects=custom_objects)
        return cls(**config)


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: a regulariser as a dict, a sequence as a list, a NumPy number as a number."""
    if isinstance(value, (L1Decay, L2Decay)):
        return {"kind": type(value).__name__, "coefficient": value.regularization_coeff}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else plain(value)


def _regularizer(value: Any) -> Any:
    """The regulariser that a mapping of a saved model describes; anything else as it is."""
    kinds = {"L1Decay": L1Decay, "L2Decay": L2Decay}
    known = isinstance(value, Mapping) and value.get("kind") in kinds
    return kinds[value["kind"]](value["coefficient"]) if known else value


class FixedMomentum(Adoption):
    """Momentum and regularisation that were given as arguments: nothing is taken from any optimizer."""

    def __init__(self, options: PaddleOptions, optimizer: Any) -> None:
        self._by_sign = isinstance(options.regularization, L1Decay)
        super().__init__(optimizer, options.to_config([]))

    def decayed(self, index: int, variable: Any) -> Any:
        """X in G = clip(g) + c * x, where the core adds weight decay: the variable, or its sign for L1."""
        raw = raw_variable(variable)
        return tf.sign(raw) if self._by_sign else raw


class MomentumCompressor(DGCCompressor):
    """The compressor inside ``DGCMomentum``: Paddle's rules about what is compressed, and its own momentum.

    Attributes:
        options: Paddle's arguments.
    """

    works_alone = True

    def __init__(self, regularization: Any, process_set: Any, transport: Any, **given: Any) -> None:
        super().__init__({"process_set": process_set, "transport": transport})
        named = {f.name: given.pop(f.name) for f in dataclasses.fields(PaddleOptions) if f.name in given}
        self.options = PaddleOptions(**named, regularization=_regularizer(regularization), codecs=given)
        self.config = self.options.to_config([])
        if is_alone(process_set) is not None and self.process_set().included():
            self.options.check_ranks(self.process_set().size())

    def adopt(self, optimizer: Any, process_set: Any = None) -> None:
        """Nothing is adopted: the momentum is this compressor's own argument."""

    def _open_engine(self, variables: list[Any], optimizer: Any, transport: Transport, process_set: Any) -> Engine:
        """Make the engine; with one process, too, where nothing else would apply the momentum."""
        names = self._names if len(self._names) == len(variables) else unique_names(variables)

        def build() -> dict[str, Any]:
            self.options.check_ranks(transport.size)
            rate = self.options.learning_rate
            # Here, where an error of one rank is raised on all: it refuses an optimizer that clips.
            self.adoption = FixedMomentum(self.options, optimizer)
            shown = rate if isinstance(rate, float) else "a schedule"
            return {"learning_rate": shown, "regularization": repr(self.options.regularization)}

        agree_or_raise(transport, build, "arguments", advice="Give every rank the same arguments and the same model.")
        described = [describe(n, raw_variable(v)) for n, v in zip(names, variables, strict=True)]
        config = self.options.to_config(described)
        if transport.size == 1:
            warn_of_one_process()
            config = dataclasses.replace(config, rampup_begin_step=_NEVER)
        assert self.adoption is not None
        return Engine(variables, config, transport, self.adoption, 1.0, names=names)

    def _require_states(self, state: Any, resize: bool) -> list[Any]:
        with as_state_error():
            return super()._require_states(state, resize)

    def _own(self, states: list[Any], resize: bool) -> dict[str, Any]:
        """This rank's state, made of some in the form of :meth:`state_dict`."""
        for state in [] if is_empty(states[0]) else states:
            require_keys(state, ("parameters", "step", "rank", "size", "format"))
        with as_state_error():
            return super()._own(states, resize)


if _IS_LEGACY:
    import tf_keras

    from dgc.tensorflow.keras.legacy import Distributed

    @tf_keras.saving.register_keras_serializable(package="dgc", name="DGCMomentum")
    class _Momentum(PaddleOptimizer, Distributed, tf_keras.optimizers.SGD):
        """Legacy Keras' own LossScaleOptimizer around it has the gradients exchanged before it decides."""

        def __init__(self, **arguments: Any) -> None:
            settings = _Settings(arguments)
            options = settings.compression.options
            tf_keras.optimizers.SGD.__init__(self, options.learning_rate, name=options.name or _NAME)
            self._dgc_settings = settings

else:
    import keras

    from dgc.tensorflow.keras.keras3 import DistributedLossScaleOptimizer, DistributedOptimizer

    class _OverSGD(PaddleOptimizer):
        """The common part of both classes for Keras 3."""

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
        """For the policy mixed_float16: it scales losses, and all ranks skip the same steps."""

        def __init__(self, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000, **arguments: Any) -> None:
            super().__init__(arguments, initial_scale=initial_scale, dynamic_growth_steps=dynamic_growth_steps)
