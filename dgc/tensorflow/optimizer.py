"""``DistributedOptimizer`` under the name and with the arguments of ``horovod.tensorflow``."""

from __future__ import annotations

from dgc.tensorflow.engine.horovod import ProcessSet, ReduceOp
from dgc.tensorflow.engine.optimizers import Optimizer


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet | None = None,
) -> Optimizer:
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
