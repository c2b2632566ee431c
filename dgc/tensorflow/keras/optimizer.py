"""``DistributedOptimizer`` and ``load_model`` for both Keras."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from dgc.adapter.checks import check_passes, check_predivide, refuse_grouping
from dgc.adapter.compressor import check_compression, horovods
from dgc.adapter.options import Compressing
from dgc.core.checks import brief
from dgc.errors import ConfigError
from dgc.tensorflow.adoption import KERAS3, Optimizer, family
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.horovod import HOROVOD, ProcessSet, ReduceOp
from dgc.tensorflow.reduce import Reducer, reducer_of


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet | None = None,
) -> Optimizer:
    """Make a Keras optimizer exchange gradients before they are applied.

    The arguments are those of ``horovod.tensorflow.keras.DistributedOptimizer``. With
    ``compression=Compression.dgc(...)`` gradients are sent compressed, and the momentum of an SGD moves into the
    compressor. ``compression=None`` averages them with Horovod. This also works under Keras 3, where Horovod's own
    optimizer does not average.

    Returns:
        For Keras 3 an optimizer that holds the given one; for legacy Keras the given one itself. Its attribute
        ``compression`` is the compressor.

    Raises:
        ConfigError: arguments do not fit together, momentum would be applied twice, or this is not a Keras optimizer.
    """
    HOROVOD.module(initialized=False)
    texts = {"name": name, "device_dense": device_dense, "device_sparse": device_sparse}
    check_compression(compression, DGCCompressor, "dgc.tensorflow", **texts)
    refuse_grouping(num_groups, groups)
    check_passes(backward_passes_per_step)
    if isinstance(compression, DGCCompressor):
        op = compression.use_op(op, gradient_predivide_factor)
    else:
        op = HOROVOD.op_name(op or "average")
        check_predivide(gradient_predivide_factor, op)
    reducer = Reducer(
        horovods(compression),
        op=op,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        predivide=gradient_predivide_factor,
    )
    kind = family(optimizer)
    if kind is None:
        raise ConfigError(f"{brief(optimizer)} is no Keras optimizer")
    ours = reducer_of(optimizer)
    if ours is not None and not ours.lost and (ours.compression is not None or reducer.compression is None):
        raise ConfigError("this optimizer is distributed already; wrap the plain Keras optimizer only once")
    if kind == KERAS3:
        from dgc.tensorflow.keras.keras3 import wrap_keras3

        return wrap_keras3(optimizer, reducer, name)
    from dgc.tensorflow.keras.legacy import wrap_legacy

    return wrap_legacy(optimizer, reducer, name)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type[Optimizer]] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: Compressing = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model, and make its optimizer distributed if it is not.

    The arguments are those of ``horovod.tensorflow.keras.load_model``; ``legacy_opts`` has no effect. ``compression``
    is for the model of a dense run; the compressor takes over the momentum of the model's optimizer. A model that was
    saved with a compressor is loaded with that compressor's options.

    Raises:
        ConfigError: ``compression`` is given, and the model was saved with a compressor and all its options.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    ours = reducer_of(optimizer)
    if ours is not None:
        if compression is None:
            return model
        if ours.compression is not None and not ours.lost:
            raise ConfigError(
                "the model was saved with a compressor and keeps its options; leave compression out, or compile the "
                "model with a new DistributedOptimizer"
            )
    model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    compiled_with = getattr(model, "_compile_config", None)  # Keras 3 saves this
    if compiled_with is not None:
        compiled_with.config["optimizer"] = model.optimizer
    return model
