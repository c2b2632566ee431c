"""``DistributedOptimizer``: Horovod's name for all optimizers of TensorFlow; for Keras see ``dgc.tensorflow.keras``."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from dgc.adapter.compression import check_passes, check_predivide, refuse_adasum, refuse_grouping
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod.horovod import HOROVOD, is_alone
from dgc.tensorflow.engine.optimizers import V1, family
from dgc.tensorflow.reduce.options import ReduceOptions
from dgc.tensorflow.reduce.settings import HasSettings, Settings, check_compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer exchange gradients before it applies them.

    Arguments are those of ``horovod.tensorflow.DistributedOptimizer``. Keras optimizers go to
    :func:`dgc.tensorflow.keras.DistributedOptimizer`; one of ``tf.compat.v1.train`` is made distributed in place: its
    ``compute_gradients`` returns reduced gradients.

    Raises:
        ConfigError: arguments that do not fit together, or momentum applied twice.
    """
    HOROVOD.module(initialized=False)
    check_compression(compression, name=name, device_dense=device_dense, device_sparse=device_sparse)
    if family(optimizer) != V1:
        # Keras takes a second to import, and whoever gets here has it.
        from dgc.tensorflow.keras.optimizer import DistributedOptimizer as for_keras

        return for_keras(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    refuse_grouping(num_groups, groups)
    refuse_adasum(op, HOROVOD)
    check_passes(backward_passes_per_step)
    if backward_passes_per_step != 1:
        raise ConfigError(
            "backward_passes_per_step > 1 is not supported for optimizers of tf.compat.v1.train; use a Keras optimizer"
        )
    if isinstance(optimizer, _Distributed):
        raise ConfigError("this optimizer is distributed already; wrap the plain optimizer once")
    name_of_op = compression.op_of(op) if isinstance(compression, DGCCompressor) else HOROVOD.op_name(op or "average")
    check_predivide(gradient_predivide_factor, name_of_op)
    options = ReduceOptions(
        op, process_set, sparse_as_dense, predivide=gradient_predivide_factor, scale_local=scale_local_gradients
    )
    settings = Settings(compression, options)
    if is_alone(process_set) is False:
        settings.adopt(optimizer)
    optimizer.__class__ = _distributed_class(type(optimizer))  # type: ignore[arg-type]
    optimizer._dgc_settings = settings
    return optimizer


class _Distributed(HasSettings):
    """Mixed into the class of the user's optimizer."""

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, *args: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Compute this rank's gradients and exchange them.

        Raises:
            DGCError: ranks or steps differ, or a rank failed.
        """
        grads_and_vars = super().compute_gradients(*args, **options)  # type: ignore[misc]
        gradients, variables = zip(*grads_and_vars, strict=True)
        reduced, _ = self._dgc_settings.reduce(list(gradients), list(variables), self)
        return list(zip(reduced, variables, strict=True))


@functools.cache
def _distributed_class(base: type) -> type:
    return type(base.__name__, (_Distributed, base), {})
