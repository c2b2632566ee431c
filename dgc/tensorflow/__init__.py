"""Deep Gradient Compression for TensorFlow scripts that use Horovod.

    import horovod.tensorflow as hvd
    import dgc.tensorflow as dgc

    compression = dgc.Compression.dgc(optimizer=optimizer)
    tape = dgc.DistributedGradientTape(tape, compression=compression)

Keras users find the optimizer and the callbacks in ``dgc.tensorflow.keras``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dgc import errors
from dgc.contrib import paddle
from dgc.contrib.paddle import *  # noqa: F403
from dgc.errors import *  # noqa: F403
from dgc.tensorflow.compressor import Compression, DGCCompressor
from dgc.tensorflow.join import join
from dgc.tensorflow.tape import DistributedGradientTape

if TYPE_CHECKING:
    from dgc.tensorflow.keras import DGCMomentum, DGCMomentumOptimizer
    from dgc.tensorflow.keras.optimizer import DistributedOptimizer

__all__ = [
    "Compression",
    "DGCCompressor",
    "DGCMomentum",
    "DGCMomentumOptimizer",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "join",
]
__all__ += errors.__all__
__all__ += paddle.__all__


def __getattr__(name: str) -> Any:
    # These are Keras optimizers, and importing Keras takes a second.
    if name in ("DGCMomentum", "DGCMomentumOptimizer", "DistributedOptimizer"):
        return getattr(importlib.import_module("dgc.tensorflow.keras"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
