"""Deep Gradient Compression for TensorFlow scripts that use Horovod.

    import horovod.tensorflow as hvd
    import dgc.tensorflow as dgc

    compression = dgc.Compression.dgc(optimizer=optimizer)
    tape = dgc.DistributedGradientTape(tape, compression=compression)

Keras users find the optimizer and the callbacks in ``dgc.tensorflow.keras``.
"""

from typing import Any

from dgc.adapter.paddle import L1Decay, L1DecayRegularizer, L2Decay, L2DecayRegularizer
from dgc.errors import ConfigError, DGCError, LayoutError, RemoteError, TransportError, WireError
from dgc.tensorflow.compression import Compression
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.optimizer import DistributedOptimizer
from dgc.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Compression",
    "ConfigError",
    "DGCCompressor",
    "DGCError",
    "DGCMomentum",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "LayoutError",
    "PartialDistributedGradientTape",
    "RemoteError",
    "TransportError",
    "WireError",
]


def __getattr__(name: str) -> Any:
    # It is a Keras optimizer, and Keras takes a second to import.
    if name == "DGCMomentum":
        from dgc.tensorflow.keras.momentum.optimizer import DGCMomentum

        return DGCMomentum
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
