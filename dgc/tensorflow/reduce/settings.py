"""What a distributed optimizer was told, in a form that is saved with the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dgc.adapter import compression as compression_of
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod.horovod import HOROVOD, import_horovod, is_alone
from dgc.tensorflow.engine.optimizers import without_loss_scale
from dgc.tensorflow.reduce.dense import DenseReducer
from dgc.tensorflow.reduce.local import LocalVariables
from dgc.tensorflow.reduce.options import DEFAULTS, ReduceOptions
from dgc.tensorflow.reduce.reducer import Reducer

_SAVED = ("sparse_as_dense", "passes", "average_passes", "predivide", "scale_local")
"""Options that are saved with a model as they are."""

_PLAIN = (bool, int, float, str, list, tuple, type(None))


def check_compression(compression: Any, **texts: Any) -> None:
    """:func:`dgc.adapter.compression.check_compression` for TensorFlow."""
    compression_of.check_compression(compression, DGCCompressor, "dgc.tensorflow", **texts)


class Settings:
    """The arguments of ``DistributedOptimizer`` beside the optimizer, and the reducer that they describe.

    Attributes:
        reducer: reduces the gradients.
        process_set: the ranks that exchange; None for all.
        accumulation_steps: Keras' ``gradient_accumulation_steps`` when the reducer does it; else None.
    """

    def __init__(
        self,
        compression: Any = None,
        options: ReduceOptions = DEFAULTS,
        *,
        lost: Sequence[str] = (),
    ) -> None:
        """Build the reducer.

        Args:
            compression: ours, Horovod's or None.
            options: how to reduce.
            lost: names of options that were in use when the model was saved but could not be saved with it.

        Raises:
            ConfigError: arguments that do not fit together.
        """
        check_compression(compression)
        self._given = compression
        self.process_set = options.process_set
        self.accumulation_steps: int | None = None
        self._options = options
        self._lost = tuple(lost)
        self.local = LocalVariables(options.scale_local)
        self.reducer: Any = self._make_reducer(options)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of options that could not be saved with the model."""
        return self._lost

    @property
    def compression(self) -> DGCCompressor | None:
        """The compressor; None for Horovod's dense exchange."""
        return self.reducer.compression

    def adopt(self, optimizer: Any) -> None:
        """Take the optimizer's momentum out of it, before it makes its variables; not while options are missing.

        Raises:
            ConfigError: momentum twice.
        """
        if self.compression is not None and not self._lost:
            self.compression.adopt(optimizer, self.process_set)

    def require_complete(self) -> None:
        """Refuse to exchange for a model that was saved with options that could not be saved with it.

        It loads, so that it can be evaluated, saved, and given its options again.

        Raises:
            ConfigError: it was, and there are others to exchange with.
        """
        if self._lost and is_alone(self.process_set) is not True:
            raise ConfigError(
                f"the model was saved with {', '.join(self._lost)}, which cannot be saved; before you train it "
                "further, compile it again on every rank: model.compile(optimizer=dgc.tensorflow.keras."
                "DistributedOptimizer(model.optimizer, compression=..., process_set=...), loss=...)"
            )

    def accumulate(self, steps: int) -> None:
        """Take over Keras' gradient accumulation, which averages.

        Raises:
            ConfigError: ``backward_passes_per_step`` accumulates too.
        """
        if self.reducer.passes != 1:
            raise ConfigError(
                "both backward_passes_per_step and the optimizer's gradient_accumulation_steps are set; choose one"
            )
        self.accumulation_steps = steps
        self.reducer = self._make_reducer(dataclasses.replace(self._options, passes=steps, average_passes=True))

    def reduce(self, gradients: Any, variables: Any, optimizer: Any, **options: Any) -> tuple[list[Any], Any]:
        """One step: see :meth:`dgc.tensorflow.reduce.local.LocalVariables.reduce`."""
        return self.local.reduce(self.reducer, gradients, variables, optimizer, **options)

    def _make_reducer(self, options: ReduceOptions) -> Any:
        kind = Reducer if isinstance(self._given, DGCCompressor) else DenseReducer
        return kind(self._given, options)

    def refuse_loss_scale(self) -> None:
        """The distributed loss-scale optimizer hands over unscaled gradients.

        Raises:
            ConfigError: the compressor has a ``loss_scale`` of its own.
        """
        if self.compression is not None and self.compression.given_options.get("loss_scale", 1.0) != 1.0:
            raise ConfigError(
                "the distributed optimizer unscales gradients itself under mixed_float16; leave loss_scale out of the "
                "compressor"
            )

    def to_config(self) -> dict[str, Any]:
        """Plain values that :meth:`from_config` understands."""
        config: dict[str, Any] = {name: getattr(self._options, name) for name in _SAVED}
        config.update(op=None, options=None, lost=list(self._lost))
        if self.process_set is not None:
            config["lost"].append("process_set")
        if self.compression is not None:
            options = self.compression.given_options
            config["options"] = {k: v for k, v in options.items() if isinstance(v, _PLAIN) and k != "op"}
            config["options"]["op"] = self.compression.config.op
            config["algorithm"] = self.compression.config.algorithm
            config["lost"] += [k for k, v in options.items() if not isinstance(v, _PLAIN) and k != "op"]
        else:
            config["op"] = HOROVOD.op_name(self._options.op or "average")
            if self._given not in (None, import_horovod().Compression.none):
                config["lost"].append("compression")
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Settings:
        """Build anew what :meth:`to_config` described, with a compressor that begins with empty residuals."""
        options, lost = config["options"], config["lost"]
        # In place of a wrapper stands a compressor that refuses to train until it is compiled anew.
        algorithm = "dgc" if "members" in lost else config.get("algorithm", "dgc")
        compression = None if options is None else DGCCompressor(options, algorithm)
        op = config.get("op") if options is None else None  # a compressor has its own
        saved = {name: config[name] for name in _SAVED if name in config}
        return cls(compression, ReduceOptions(op, **saved), lost=lost)


class HasSettings:
    """Mixed into a distributed optimizer: what everybody may ask it about its exchange."""

    _dgc_settings: Settings

    _dgc_scales_loss = False

    def register_local_var(self, var: Any) -> None:
        """Leave this variable's gradient on its rank.

        Raises:
            ConfigError: the loss is scaled: an overflow in this variable alone would have this rank skip a step that
                the others apply.
        """
        if self._dgc_scales_loss:
            raise ConfigError(
                "register_local_var() and a loss scale do not go together: a rank whose local gradient overflows would "
                "skip a step that the others apply; train without mixed_float16 (mixed_bfloat16 needs no scale)"
            )
        self._dgc_settings.local.add(var)

    @property
    def compression(self) -> Any:
        """The compressor: statistics, state and residuals of this rank."""
        return self._dgc_settings.compression

    @property
    def process_set(self) -> Any:
        """The ranks that exchange; None for all."""
        return self._dgc_settings.process_set


def distributed_in(optimizer: Any) -> Any:
    """The distributed optimizer of ours that this is or that a LossScaleOptimizer holds; None if there is none.

    Asked by class: a script's own optimizer may have attributes of the same names.
    """
    return next((o for o in (optimizer, without_loss_scale(optimizer)) if isinstance(o, HasSettings)), None)
