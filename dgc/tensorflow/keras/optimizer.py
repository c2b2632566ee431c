"""``DistributedOptimizer`` for whichever Keras the optimizer belongs to."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dgc.adapter.compression import check_passes, check_predivide, refuse_adasum, refuse_grouping
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod.horovod import HOROVOD
from dgc.tensorflow.engine.optimizers import KERAS3, LEGACY, LEGACY_V2, family
from dgc.tensorflow.reduce.options import ReduceOptions
from dgc.tensorflow.reduce.settings import Settings, check_compression, distributed_in


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer exchange gradients before it applies them.

    Arguments are those of ``horovod.tensorflow.keras.DistributedOptimizer``. With ``compression=Compression.dgc(...)``
    gradients travel compressed, and the momentum of an SGD moves into the compressor. ``compression=None`` averages
    them with Horovod, also under Keras 3, where Horovod's own optimizer does not.

    Returns:
        For Keras 3 an optimizer around the given one; for legacy Keras the given one itself. Its ``compression``
        attribute is the compressor.

    Raises:
        ConfigError: arguments that do not fit together, momentum applied twice, or no Keras optimizer.
    """
    HOROVOD.module(initialized=False)
    check_compression(compression, name=name, device_dense=device_dense, device_sparse=device_sparse)
    refuse_grouping(num_groups, groups)
    refuse_adasum(op, HOROVOD)
    check_passes(backward_passes_per_step)
    kind = family(optimizer)
    if kind not in (KERAS3, LEGACY, LEGACY_V2):
        raise ConfigError(
            f"{optimizer!r} is no Keras optimizer; dgc.tensorflow.DistributedOptimizer takes those of "
            "tf.compat.v1.train"
        )
    name_of_op = compression.op_of(op) if isinstance(compression, DGCCompressor) else HOROVOD.op_name(op or "average")
    check_predivide(gradient_predivide_factor, name_of_op)
    options = ReduceOptions(
        op,
        process_set,
        sparse_as_dense,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        predivide=gradient_predivide_factor,
        scale_local=scale_local_gradients,
    )
    settings = Settings(compression, options)
    if kind == KERAS3:
        from dgc.tensorflow.keras.keras3 import wrap
    else:
        from dgc.tensorflow.keras.legacy import wrap
    return wrap(optimizer, settings, name)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model, and make its optimizer distributed if it is none yet.

    Arguments are those of ``horovod.tensorflow.keras.load_model``.

    Args:
        filepath: what the model was saved as.
        custom_optimizers: further classes of optimizers.
        custom_objects: further names that the model needs.
        compression: for the optimizer of a dense run, whose momentum becomes the compressor's. A model that was saved
            with one of our wrappers has its own.
        legacy_opts: without effect: optimizers of both kinds are known.

    Raises:
        ConfigError: a compressor for a model that has one already, and all that it was given.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    ours = distributed_in(optimizer)
    if ours is not None:
        if compression is None:
            return model
        if not ours._dgc_settings.lost:
            raise ConfigError(
                "the model was saved with a distributed optimizer and goes on with its options; leave compression out, "
                "or compile the model with a new DistributedOptimizer"
            )
    model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    compiled_with = getattr(model, "_compile_config", None)  # what Keras 3 saves
    if compiled_with is not None:
        compiled_with.config["optimizer"] = model.optimizer
    return model
