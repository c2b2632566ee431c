"""Deep Gradient Compression for Keras: one call for Keras 3 and for legacy Keras (``tf_keras``).

Use::

    import dgc.tensorflow.keras as dgc

    optimizer = dgc.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=dgc.Compression.dgc())
    model.compile(optimizer=optimizer, loss=...)
    model.fit(..., callbacks=[dgc.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from dgc import errors
from dgc.contrib import paddle
from dgc.contrib.paddle import *  # noqa: F403
from dgc.errors import *  # noqa: F403
from dgc.tensorflow.compressor import Compression, DGCCompressor
from dgc.tensorflow.join import join
from dgc.tensorflow.keras import callbacks
from dgc.tensorflow.keras.contrib.momentum import DGCMomentum
from dgc.tensorflow.keras.optimizer import DistributedOptimizer, load_model

DGCMomentumOptimizer = DGCMomentum  # Paddle's name

__all__ = [
    "Compression",
    "DGCCompressor",
    "DGCMomentum",
    "DGCMomentumOptimizer",
    "DistributedOptimizer",
    "callbacks",
    "join",
    "load_model",
]
__all__ += errors.__all__
__all__ += paddle.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
