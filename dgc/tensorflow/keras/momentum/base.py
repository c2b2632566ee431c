"""What ``DGCMomentum`` is in either Keras: its arguments checked and saved, and its methods beside Keras' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dgc.adapter.paddle import ArgumentError, ExchangeMethods, L1Decay, L2Decay, PaddleOptions, Regularizer
from dgc.errors import ConfigError
from dgc.tensorflow.engine.horovod import import_horovod
from dgc.tensorflow.keras.momentum.compressor import MomentumCompressor, MomentumReducer
from dgc.tensorflow.reduce.settings import Settings
from dgc.tensorflow.reduce.step import ReduceOptions

_PLACE = ("iterations", "learning_rate")
"""What a state holds beside the compressor's."""


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
    own = {k: _regularizer(v) for k, v in (given.pop("parameter_regularization") or {}).items()}
    rates = given.pop("parameter_learning_rate", None) or {}
    process_set, transport, lost = given.pop("process_set", None), given.pop("transport"), given.pop("lost", ())
    named = {f.name: given.pop(f.name) for f in dataclasses.fields(PaddleOptions) if f.name in given}
    named["regularization"] = _regularizer(named["regularization"])
    options = PaddleOptions(**named, codecs=given)
    compressor = MomentumCompressor(options, own, rates, process_set, transport)
    reduction = ReduceOptions(process_set=process_set)
    settings = Settings(compressor, reduction, lost=lost)
    settings.reducer = MomentumReducer(compressor, reduction)
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
    plain = {
        f.name: list(value) if isinstance(value := getattr(options, f.name), (list, tuple)) else value
        for f in dataclasses.fields(options)
        if f.name not in ("learning_rate", "name", "codecs")
    }
    return {
        **plain,
        "regularization": _plain(options.regularization),
        "parameter_regularization": {k: _plain(v) for k, v in compressor.parameter_regularization.items()},
        "parameter_learning_rate": dict(compressor.parameter_learning_rate),
        "transport": given if isinstance(given, str) else "auto",
        "lost": lost,
        **options.codecs,
    }


class PaddleOptimizer(ExchangeMethods):
    """What ``DGCMomentum`` has beside Keras' methods, mixed into a class of either Keras."""

    compression: Any
    iterations: Any
    learning_rate: Any

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

    @property
    def _exchanges(self) -> Any:
        return self.compression

    def _set_iterations(self, value: int) -> None:
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Build it as it was saved; the compressor begins with an empty state."""
        config = {k: v for k, v in config.items() if k != "is_legacy_optimizer"}
        if isinstance(config["learning_rate"], dict):
            load = tf.keras.optimizers.schedules.deserialize
            config["learning_rate"] = load(config["learning_rate"], custom_objects=custom_objects)
        return cls(**config)


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
