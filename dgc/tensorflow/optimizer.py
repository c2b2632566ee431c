"""What every distributed optimizer holds: its reducer, whose arguments are saved with the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter import compression as compression_of
from dgc.adapter.compression import check_passes, check_predivide, horovods, refuse_adasum, refuse_grouping
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import Adoption, Optimizer, without_loss_scale
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.horovod import HOROVOD, ProcessSet, import_horovod, is_alone
from dgc.tensorflow.reduce import DEFAULTS, Gradient, ReduceOptions, Reducer
from dgc.tensorflow.tensors import Variable

_SAVED = ("sparse_as_dense", "passes", "average_passes", "predivide")
"""Options that are saved with a model as they are."""

_PLAIN = (bool, int, float, str, list, tuple, type(None))


check_compression = functools.partial(compression_of.check_compression, own=DGCCompressor, package="dgc.tensorflow")


class Settings(Reducer):
    """The arguments of ``DistributedOptimizer`` beside the optimizer: how it reduces gradients, and how it is saved.

    Attributes:
        lost: names of options that were in use when the model was saved but could not be saved with it.
    """

    def __init__(
        self, compression: object = None, options: ReduceOptions = DEFAULTS, *, lost: Sequence[str] = ()
    ) -> None:
        super().__init__(compression, options)
        self.lost = tuple(lost)

    @property
    def process_set(self) -> ProcessSet | None:
        """The ranks that exchange; None for all."""
        return self.options.process_set

    @property
    def adoption(self) -> Adoption | None:
        """Momentum that the compressor has adopted, if there is one."""
        return None if self.compression is None else self.compression.adoption

    def adopt(self, optimizer: Optimizer) -> None:
        """Take the optimizer's momentum out of it, before it makes its variables; not while options are missing.

        Nothing is adopted in a job of one process.
        """
        if is_alone(self.process_set) is False and self.compression is not None and not self.lost:
            self.compression.adopt(optimizer, self.process_set)

    def bind(self, variables: Sequence[Variable], optimizer: Optimizer) -> None:
        """Attach the compressor to the model before the first step; collective."""
        self.require_complete()
        if self.compression is not None:
            self.compression.bind(variables, optimizer, self.process_set)

    @property
    def missing(self) -> Sequence[str]:
        """Names of options without which a loaded model cannot exchange with others."""
        return self.lost if self.lost and is_alone(self.process_set) is not True else ()

    def require_complete(self) -> None:
        """Refuse to exchange for a model that was saved with options that could not be saved with it.

        It loads, so that it can be evaluated, saved, and given its options again.
        """
        if self.missing:
            raise ConfigError(
                f"the model was saved with {', '.join(self.lost)}, which cannot be saved; before you train it "
                "further, compile it again on every rank: model.compile(optimizer=dgc.tensorflow.keras."
                "DistributedOptimizer(model.optimizer, compression=..., process_set=...), loss=...)"
            )

    def reduce(self, *arguments: Any) -> tuple[list[Gradient], tf.Tensor]:
        """See :meth:`dgc.tensorflow.reduce.Reducer.reduce`."""
        self.require_complete()
        return super().reduce(*arguments)

    def to_config(self) -> dict[str, Any]:
        """Plain values that :meth:`from_config` understands."""
        config: dict[str, Any] = {name: getattr(self.options, name) for name in _SAVED}
        config.update(op=None, options=None, lost=list(self.lost))
        if self.process_set is not None:
            config["lost"].append("process_set")
        if self.compression is not None:
            given = self.compression.given_options
            config["options"] = {k: v for k, v in given.items() if isinstance(v, _PLAIN) and k != "op"}
            config["options"]["op"] = self.compression.config.op
            config["algorithm"] = self.compression.config.algorithm
            config["lacks_residuals"] = self.compression._lacks_residuals or self.compression.residual_norm > 0
            config["names"] = self.compression.variable_names()
            config["lost"] += [k for k, v in given.items() if not isinstance(v, _PLAIN) and k != "op"]
        else:
            config["op"] = HOROVOD.op_name(self.options.op or "average")
            if self._horovods not in (None, import_horovod().Compression.none):
                config["lost"].append("compression")
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Build anew what :meth:`to_config` described, with a compressor that begins with empty residuals."""
        options, lost = config["options"], config["lost"]
        compression = None
        if options is not None:
            compression = DGCCompressor(options, config["algorithm"])
            compression._lacks_residuals, compression._names = config["lacks_residuals"], config["names"]
        return cls(compression, ReduceOptions(config["op"], **{name: config[name] for name in _SAVED}), lost=lost)


def make_settings(arguments: Mapping[str, Any]) -> Settings:
    """Settings from the arguments of Horovod's ``DistributedOptimizer``, by name."""
    given = arguments.__getitem__
    compression, op = given("compression"), given("op")
    HOROVOD.module(initialized=False)
    check_compression(compression, **{name: given(name) for name in ("name", "device_dense", "device_sparse")})
    refuse_grouping(given("num_groups"), given("groups"))
    refuse_adasum(op, HOROVOD)
    check_passes(given("backward_passes_per_step"))
    name_of_op = compression.op_of(op) if isinstance(compression, DGCCompressor) else HOROVOD.op_name(op or "average")
    check_predivide(given("gradient_predivide_factor"), name_of_op)
    options = ReduceOptions(
        op,
        given("process_set"),
        given("sparse_as_dense"),
        passes=given("backward_passes_per_step"),
        average_passes=given("average_aggregated_gradients"),
        predivide=given("gradient_predivide_factor"),
    )
    return Settings(horovods(compression), options)


class HasSettings:
    """Mixed into a distributed optimizer: its exchange."""

    _dgc_settings: Settings

    @property
    def compression(self) -> DGCCompressor | None:
        """The compressor: statistics, state and residuals of this rank."""
        return self._dgc_settings.compression

    @property
    def process_set(self) -> ProcessSet | None:
        """The ranks that exchange; None for all."""
        return self._dgc_settings.process_set

    def bind(self, variables: Sequence[Variable]) -> None:
        """Attach the compressor to the model before the first step; collective."""
        self._dgc_settings.bind(variables, without_loss_scale(self))


def distributed_in(optimizer: Optimizer) -> Any:
    """The distributed optimizer of ours that this is or that a LossScaleOptimizer holds; None if there is none.

    By class: a script's own optimizer may have attributes of the same names.
    """
    return next((o for o in (optimizer, without_loss_scale(optimizer)) if isinstance(o, HasSettings)), None)
