"""Deep Gradient Compression for data-parallel training with Horovod.

Import the adapter of your framework: ``import dgc.torch as dgc`` or ``import dgc.tensorflow as dgc``.
This package itself loads no framework, no MPI and no CuPy.
"""

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
