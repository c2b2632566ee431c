"""``DGCMomentum``: Paddle's ``DGCMomentumOptimizer`` for TensorFlow, as an optimizer of whichever Keras is in use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter.paddle import COMPRESSED_TYPES, MIN_NUMEL, ArgumentError, L1Decay, L2Decay, PaddleOptions, Regularizer
from dgc.core.exchange.records import Stats
from dgc.errors import ConfigError
from dgc.tensorflow.horovod import import_horovod
from dgc.tensorflow.momentum import MomentumCompressor, MomentumReducer
from dgc.tensorflow.settings import Settings

_PLACE = ("iterations", "learning_rate")
"""What a state holds beside the compressor's."""


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
    parameter_regularization: Mapping[str, Regularizer] | None = None,
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
        min_numel: smaller variables travel dense.
        dtypes: names of the types that are compressed.
        exclude: name patterns (fnmatch) of variables that travel dense.
        parameter_regularization: name patterns of variables and their own regularisers, which go before
            ``regularization``; the first match counts.
        process_set: the Horovod process set to average over; None means all ranks.
        transport: "auto", "mpi", "horovod" or a transport.
        **codecs: ``indices="uint16"``, ``values="float32"``, ``bucket_bytes=25 MiB``, ``momentum_masking=True``.

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
    if learning_rate is not None and lr is not None:
        raise ConfigError("learning_rate and lr mean the same; give one of them")
    return _classes()[_is_mixed()](
        learning_rate=learning_rate if lr is None else lr,
        momentum=momentum,
        rampup_begin_step=rampup_begin_step,
        rampup_step=rampup_step,
        sparsity=sparsity,
        use_nesterov=use_nesterov,
        local_grad_clip_norm=local_grad_clip_norm,
        num_trainers=num_trainers,
        regularization=regularization,
        name=name,
        min_numel=min_numel,
        dtypes=dtypes,
        exclude=exclude,
        parameter_regularization=parameter_regularization,
        process_set=process_set,
        transport=transport,
        **codecs,
    )


def make_settings(arguments: Mapping[str, Any]) -> Settings:
    """Check the arguments of an optimizer's class and build what exchanges the gradients.

    Args:
        arguments: of :func:`DGCMomentum`, without ``lr``; or what :func:`saved_arguments` returned, with the learning
            rate and the name. Surplus ones are codec options.

    Raises:
        ArgumentError: (an AssertionError) what Paddle asserts.
        ConfigError: another option out of range.
        TypeError: ``rampup_begin_step`` is missing, or an unknown option.
    """
    import_horovod(initialized=False)
    given = dict(arguments)
    rate, sparsity, exclude = given.pop("learning_rate"), given.pop("sparsity"), given.pop("exclude")
    own = given.pop("parameter_regularization") or {}
    process_set, transport, lost = given.pop("process_set", None), given.pop("transport"), given.pop("lost", ())
    named = {f.name: given.pop(f.name) for f in dataclasses.fields(PaddleOptions) if f.name in given}
    named["regularization"] = _regularizer(named["regularization"])
    named["dtypes"] = tuple(named["dtypes"])
    options = PaddleOptions(
        **named,
        learning_rate=float(rate) if isinstance(rate, int) and not isinstance(rate, bool) else rate,
        sparsity=tuple(sparsity) if isinstance(sparsity, (list, tuple)) else sparsity,
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        codecs=given,
    )
    compressor = MomentumCompressor(options, {k: _regularizer(v) for k, v in own.items()}, process_set, transport)
    settings = Settings(compressor, process_set=process_set, lost=tuple(lost))
    settings.reducer = MomentumReducer(compressor, process_set=process_set)
    return settings


def saved_arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of :func:`DGCMomentum` in plain values, without the learning rate and the name."""
    compressor = settings.compression
    assert isinstance(compressor, MomentumCompressor)
    options, lost = compressor.options, list(settings.lost)
    if settings.process_set is not None:
        lost.append("process_set")
    given = compressor.given_options["transport"]
    if not isinstance(given, str):
        lost.append("transport")
    return {
        "momentum": options.momentum,
        "rampup_begin_step": options.rampup_begin_step,
        "rampup_step": options.rampup_step,
        "sparsity": list(options.sparsity) if isinstance(options.sparsity, Sequence) else options.sparsity,
        "use_nesterov": options.use_nesterov,
        "local_grad_clip_norm": options.local_grad_clip_norm,
        "num_trainers": options.num_trainers,
        "regularization": _plain(options.regularization),
        "min_numel": options.min_numel,
        "dtypes": list(options.dtypes),
        "exclude": list(options.exclude),
        "parameter_regularization": {k: _plain(v) for k, v in compressor.parameter_regularization.items()},
        "transport": given if isinstance(given, str) else "auto",
        "lost": lost,
        **options.codecs,
    }


class PaddleOptimizer:
    """What ``DGCMomentum`` has beside Keras' methods, mixed into a class of either Keras."""

    compression: Any
    iterations: Any
    learning_rate: Any

    @property
    def stats(self) -> Stats:
        """Bytes, densities and seconds of the exchange."""
        return self.compression.stats

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
            not sent yet), in the variable's shape; ``"step"``, ``"rank"``, ``"size"``, ``"iterations"``, and
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
            RuntimeError: a buffer is no array.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        bare = [{k: v for k, v in s.items() if k not in _PLACE} for s in states]
        self.compression.load_state_dict(bare[0] if isinstance(state, Mapping) else bare, resize)
        if "iterations" in states[0]:
            self._set_iterations(int(states[0]["iterations"]))
        if "learning_rate" in states[0] and isinstance(self.compression.options.learning_rate, float):
            self.learning_rate = states[0]["learning_rate"]

    set_dict = load_state_dict
    """Paddle's name."""

    def describe(self) -> dict[str, Any]:
        """What the next step will do, for a log: step, density, end of the ramp-up, shares, buckets, transport."""
        return self.compression.describe()

    def reset(self) -> None:
        """Forget momentum, residuals, the step and the statistics; call it on all ranks."""
        self.compression.reset()

    def close(self) -> None:
        """End the communication thread and free the communicator."""
        self.compression.close()

    def _set_iterations(self, value: int) -> None:
        raise NotImplementedError


def _is_mixed() -> bool:
    return not _is_legacy() and tf.keras.config.dtype_policy().name == "mixed_float16"


def _is_legacy() -> bool:
    return tf.keras.optimizers.SGD.__module__.startswith("tf_keras")


@functools.cache
def _classes() -> tuple[Any, Any]:
    """The optimizer's class, and the one for mixed precision."""
    if _is_legacy():
        from dgc.tensorflow.keras.momentum_legacy import DGCMomentum

        # Legacy Keras' own LossScaleOptimizer asks us for the exchange before it decides.
        return DGCMomentum, DGCMomentum
    from dgc.tensorflow.keras.momentum_keras3 import DGCMomentum as Plain
    from dgc.tensorflow.keras.momentum_keras3 import DGCMomentumLossScale

    return Plain, DGCMomentumLossScale


def _plain(regularizer: Regularizer) -> Any:
    if regularizer is None:
        return None
    return {"kind": type(regularizer).__name__, "coefficient": regularizer.regularization_coeff}


def _regularizer(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kinds = {"L1Decay": L1Decay, "L2Decay": L2Decay}
    if value.get("kind") not in kinds:
        raise ArgumentError(f"a regulariser is {dict(value)!r}; allowed: None, L1Decay(c) or L2Decay(c)")
    return kinds[value["kind"]](value["coefficient"])


__all__ = ["DGCMomentum", "L1Decay", "L2Decay", "PaddleOptimizer"]
