"""Deep Gradient Compression for TensorFlow scripts that use Horovod.

    import horovod.tensorflow as hvd
    import dgc.tensorflow as dgc

    compression = dgc.Compression.dgc(optimizer=optimizer)
    tape = dgc.DistributedGradientTape(tape, compression=compression)

Keras users find the optimizer and the callbacks in ``dgc.tensorflow.keras``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dgc import errors
from dgc.adapter import paddle
from dgc.adapter.paddle import *  # noqa: F403
from dgc.errors import *  # noqa: F403
from dgc.tensorflow.compressor import Compression, DGCCompressor
from dgc.tensorflow.horovod import ProcessSet as _ProcessSet
from dgc.tensorflow.horovod import ReduceOp as _ReduceOp
from dgc.tensorflow.join import join
from dgc.tensorflow.tape import DistributedGradientTape

if TYPE_CHECKING:
    from dgc.tensorflow.keras.momentum import DGCMomentum

__all__ = [
    "Compression",
    "DGCCompressor",
    "DGCMomentum",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "join",
]
__all__ += errors.__all__
__all__ += paddle.__all__


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: _ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: object = None,
    process_set: _ProcessSet | None = None,
) -> Any:
    """Make a Keras optimizer exchange gradients before it applies them.

    Arguments are those of ``horovod.tensorflow.DistributedOptimizer``; see
    :func:`dgc.tensorflow.keras.DistributedOptimizer`.

    Raises:
        ConfigError: arguments that do not fit together, momentum applied twice, or no Keras optimizer.
    """
    arguments = locals()
    del arguments["use_locking"]
    # Keras takes a second to import; a caller with a Keras optimizer has it.
    from dgc.tensorflow.keras.optimizer import DistributedOptimizer as for_keras

    return for_keras(**arguments)


def __getattr__(name: str) -> Any:
    # It is a Keras optimizer, and Keras takes a second to import.
    if name == "DGCMomentum":
        from dgc.tensorflow.keras.momentum import DGCMomentum

        return DGCMomentum
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
