"""Deep Gradient Compression for TensorFlow scripts that use Horovod.

    import horovod.tensorflow as hvd
    import dgc.tensorflow as dgc

    compression = dgc.Compression.dgc(optimizer=optimizer)
    tape = dgc.DistributedGradientTape(tape, compression=compression)

Keras users find the optimizer and the callbacks in ``dgc.tensorflow.keras``.
"""

from dgc.core.errors import ConfigError, DGCError, LayoutError, RemoteError, TransportError, WireError
from dgc.tensorflow.compression import Compression
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.optimizer import DistributedOptimizer
from dgc.tensorflow.tape import DistributedGradientTape

__all__ = [
    "Compression",
    "ConfigError",
    "DGCCompressor",
    "DGCError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LayoutError",
    "RemoteError",
    "TransportError",
    "WireError",
]
