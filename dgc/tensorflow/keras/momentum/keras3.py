"""``DGCMomentum`` for Keras 3: a distributed optimizer around a plain SGD, whose compressor holds the momentum."""

from __future__ import annotations

from typing import Any

import keras

from dgc.tensorflow.keras.keras3 import PACKAGE, DistributedLossScaleOptimizer, DistributedOptimizer
from dgc.tensorflow.keras.momentum.base import PaddleOptimizer, make_settings, saved_arguments


class _Paddle(PaddleOptimizer):
    """What both classes share."""

    inner_optimizer: Any
    _dgc_settings: Any
    name: str

    def __init__(self, arguments: dict[str, Any], **others: Any) -> None:
        settings = make_settings(arguments)
        options = settings.compression.options  # type: ignore[union-attr]
        name = options.name or "dgc_momentum"
        super().__init__(keras.optimizers.SGD(options.learning_rate), settings, name=name, **others)  # type: ignore[call-arg]

    def _set_iterations(self, value: int) -> None:
        self.inner_optimizer._iterations.assign(value)
        if isinstance(self, DistributedOptimizer):
            self._iterations.assign(value)

    def get_config(self) -> dict[str, Any]:
        """All that :meth:`from_config` needs."""
        inner = self.inner_optimizer.get_config()
        return {"learning_rate": inner["learning_rate"], "name": self.name, **saved_arguments(self._dgc_settings)}


@keras.saving.register_keras_serializable(package=PACKAGE)
class DGCMomentum(_Paddle, DistributedOptimizer):
    """See :func:`dgc.tensorflow.keras.momentum.optimizer.DGCMomentum`."""

    def __init__(self, **arguments: Any) -> None:
        """Arguments as in :func:`dgc.tensorflow.keras.momentum.optimizer.DGCMomentum`."""
        super().__init__(arguments)


@keras.saving.register_keras_serializable(package=PACKAGE)
class DGCMomentumLossScale(_Paddle, DistributedLossScaleOptimizer):
    """The same for the policy mixed_float16: it scales losses, and all ranks skip the same steps."""

    def __init__(self, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000, **arguments: Any) -> None:
        """Arguments as in :func:`dgc.tensorflow.keras.momentum.optimizer.DGCMomentum` and Keras' LossScaleOptimizer."""
        super().__init__(arguments, initial_scale=initial_scale, dynamic_growth_steps=dynamic_growth_steps)

    def get_config(self) -> dict[str, Any]:
        """All that :meth:`from_config` needs."""
        scale = {"initial_scale": self.initial_scale, "dynamic_growth_steps": self.dynamic_growth_steps}
        return {**super().get_config(), **scale}
