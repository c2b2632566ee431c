"""``DistributedOptimizer``: Horovod's name for all optimizers of TensorFlow; for Keras see ``dgc.tensorflow.keras``."""

from __future__ import annotations

import functools

import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.engine.horovod import ProcessSet, ReduceOp
from dgc.tensorflow.engine.optimizers import V1, Optimizer, family
from dgc.tensorflow.engine.tensors import Variable
from dgc.tensorflow.reduce.settings import HasSettings, make_settings
from dgc.tensorflow.reduce.step import Gradient, reduce


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
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Make an optimizer exchange gradients before it applies them.

    Arguments are those of ``horovod.tensorflow.DistributedOptimizer``. Keras optimizers go to
    :func:`dgc.tensorflow.keras.DistributedOptimizer`; one of ``tf.compat.v1.train`` is made distributed in place: its
    ``compute_gradients`` returns reduced gradients.

    Raises:
        ConfigError: arguments that do not fit together, or momentum applied twice.
    """
    arguments = locals()
    if family(optimizer) != V1:
        # Keras takes a second to import; a caller with a Keras optimizer has it.
        from dgc.tensorflow.keras.optimizer import DistributedOptimizer as for_keras

        del arguments["use_locking"]
        return for_keras(**arguments)
    settings = make_settings(arguments)
    if backward_passes_per_step != 1:
        raise ConfigError(
            "backward_passes_per_step > 1 is not supported for optimizers of tf.compat.v1.train; use a Keras optimizer"
        )
    if isinstance(optimizer, _Distributed):
        raise ConfigError("this optimizer is distributed already; wrap the plain optimizer once")
    settings.adopt(optimizer)
    optimizer.__class__ = _distributed_class(type(optimizer))  # type: ignore[arg-type]
    optimizer._dgc_settings = settings
    return optimizer


class _Distributed(HasSettings, tf.compat.v1.train.Optimizer):
    """Mixed into the class of the user's optimizer."""

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, *args: object, **options: object) -> list[tuple[Gradient, Variable]]:
        """Compute this rank's gradients and exchange them.

        Raises:
            DGCError: ranks or steps differ, or a rank failed.
        """
        grads_and_vars = super().compute_gradients(*args, **options)
        gradients, variables = zip(*grads_and_vars, strict=True)
        reduced, _ = reduce(gradients, variables, self._dgc_settings.context(self))
        return list(zip(reduced, variables, strict=True))


@functools.cache
def _distributed_class(base: type) -> type:
    return type(base.__name__, (_Distributed, base), {})
