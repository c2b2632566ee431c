"""Gradient compression for data-parallel training: PyTorch with torchrun or Horovod, Keras and TensorFlow with Horovod.

Import the adapter of your framework: ``import dgc.torch as dgc``, ``import dgc.tensorflow.keras as dgc`` or
``import dgc.tensorflow as dgc``. This package itself loads no framework, no MPI and no CuPy.
"""

from typing import NoReturn

from dgc.errors import ConfigError, DGCError, LayoutError, RemoteError, StallError, TransportError, WireError

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DGCError",
    "LayoutError",
    "RemoteError",
    "StallError",
    "TransportError",
    "WireError",
    "__version__",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'dgc' has no attribute {name!r}; import the adapter of your framework: import dgc.torch as dgc, "
        "import dgc.tensorflow.keras as dgc or import dgc.tensorflow as dgc"
    )
