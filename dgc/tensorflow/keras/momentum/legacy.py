"""``DGCMomentum`` for legacy Keras (``tf_keras``): a plain SGD that exchanges gradients before it applies them."""

from __future__ import annotations

from typing import Any

import tf_keras

from dgc.tensorflow.keras.legacy import _Distributed
from dgc.tensorflow.keras.momentum.base import PaddleOptimizer, make_settings, saved_arguments


@tf_keras.saving.register_keras_serializable(package="dgc")
class DGCMomentum(PaddleOptimizer, _Distributed, tf_keras.optimizers.SGD):
    """See :func:`dgc.tensorflow.keras.momentum.optimizer.DGCMomentum`."""

    def __init__(self, **arguments: Any) -> None:
        """Arguments as in :func:`dgc.tensorflow.keras.momentum.optimizer.DGCMomentum`."""
        settings = make_settings(arguments)
        paddle = settings.compression.options  # type: ignore[union-attr]
        tf_keras.optimizers.SGD.__init__(self, paddle.learning_rate, name=paddle.name or "dgc_momentum")
        self._dgc_settings = settings

    def _set_iterations(self, value: int) -> None:
        self.iterations.assign(value)

    def get_config(self) -> dict[str, Any]:
        """All that :meth:`from_config` needs."""
        inner = tf_keras.optimizers.SGD.get_config(self)
        return {
            "learning_rate": inner["learning_rate"],
            "name": self.name,
            "is_legacy_optimizer": False,
            **saved_arguments(self._dgc_settings),
        }
