"""``DGCMomentum``: Paddle's ``DGCMomentumOptimizer`` for TensorFlow, as an optimizer of whichever Keras is in use."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter.paddle import COMPRESSED_TYPES, MIN_NUMEL, Regularizer
from dgc.errors import ConfigError


def DGCMomentum(
    learning_rate: Any = None,
    momentum: float | None = None,
    rampup_begin_step: int | None = None,
    rampup_step: int = 1,
    sparsity: Sequence[float] = (0.999,),
    use_nesterov: bool = False,
    local_grad_clip_norm: float | None = None,
    num_trainers: int | None = None,
    regularization: Regularizer = None,
    name: str | None = None,
    *,
    lr: Any = None,
    min_numel: int = MIN_NUMEL,
    dtypes: Sequence[str] = COMPRESSED_TYPES,
    exclude: Sequence[str] = (),
    parameter_regularization: Mapping[str, Regularizer] | None = None,
    parameter_learning_rate: Mapping[str, float] | None = None,
    process_set: Any = None,
    transport: Any = "auto",
    **codecs: Any,
) -> Any:
    """Momentum SGD with Deep Gradient Compression, under Paddle's names.

    The optimizer exchanges the local gradients of all ranks when it applies them; do not wrap it in a
    ``DistributedOptimizer``, nor the tape in a ``DistributedGradientTape``. Before ``rampup_begin_step`` it is momentum
    SGD on averaged gradients. From then on every variable of at least ``min_numel`` elements sends its largest
    accumulated entries and keeps the rest for later.

    The velocity does not contain the learning rate, as in Paddle and PyTorch and unlike in Keras' SGD, so a change of
    the learning rate acts at once. A variable without a gradient (None) is left alone, as Keras does. Under the policy
    mixed_float16 the optimizer is a LossScaleOptimizer itself and all ranks skip the same steps.

    With one process nothing is compressed, whatever the step: that would only delay updates. Paddle refuses to run
    then; here it is a warning, so that a script can be tried out without a launcher.

    Args:
        learning_rate: the step size: a number or a Keras schedule.
        momentum: the momentum factor, in [0, 1).
        rampup_begin_step: the first compressed step, counted from 0.
        rampup_step: steps over which ``sparsity`` is walked through.
        sparsity: shares of entries held back, each for an equal part of the ramp-up; the last one stays.
        use_nesterov: Nesterov momentum.
        local_grad_clip_norm: c; the local gradient of a compressed variable is scaled down to an L2 norm of
            c * sqrt(P).
        num_trainers: P; needed for clipping, and checked.
        regularization: ``L1Decay(c)``, ``L2Decay(c)`` or None.
        name: of the optimizer.
        lr: another name for ``learning_rate``.
        min_numel: smaller variables are sent dense.
        dtypes: names of the types that are compressed.
        exclude: name patterns (fnmatch) of variables that are sent dense.
        parameter_regularization: name patterns of variables and their own regularisers, which go before
            ``regularization``; the first match counts.
        parameter_learning_rate: name patterns of variables and what the learning rate is multiplied by for them; the
            first match counts. Paddle's ``ParamAttr(learning_rate=...)``.
        process_set: the Horovod process set to average over; None means all ranks.
        transport: "auto", "mpi", "horovod" or a transport.
        **codecs: ``indices="elias_fano"``, ``values="float32"``, ``bucket_bytes=25 MiB``, ``momentum_masking=True``.

    Returns:
        A Keras optimizer (of Keras 3, or of ``tf_keras`` where TF_USE_LEGACY_KERAS=1) with the further methods of
        :class:`PaddleOptimizer`.

    Raises:
        ArgumentError: (an AssertionError) what Paddle asserts: missing learning rate or momentum, a negative
            ``rampup_begin_step``, a clipping norm that is no float, ``num_trainers`` missing for it or not the number
            of ranks, a regulariser of another kind.
        ConfigError: (a ValueError) another option out of range.
        TypeError: ``rampup_begin_step`` is missing, or an unknown option.

    Source: PaddlePaddle 1.6, ``DGCMomentumOptimizer``; Lin et al. 2018, arXiv 1712.01887.
    """
    arguments = {**locals(), **codecs}
    del arguments["codecs"], arguments["lr"]
    if lr is not None:
        if learning_rate is not None:
            raise ConfigError("learning_rate and lr mean the same; give one of them")
        arguments["learning_rate"] = lr
    return _classes()[_is_mixed()](**arguments)


def _is_mixed() -> bool:
    return not _is_legacy() and tf.keras.config.dtype_policy().name == "mixed_float16"


def _is_legacy() -> bool:
    return tf.keras.optimizers.SGD.__module__.startswith("tf_keras")


@functools.cache
def _classes() -> tuple[Any, Any]:
    """The optimizer's class, and the one for mixed precision."""
    if _is_legacy():
        from dgc.tensorflow.keras.momentum.legacy import DGCMomentum

        # Legacy Keras' own LossScaleOptimizer has the gradients exchanged before it decides.
        return DGCMomentum, DGCMomentum
    from dgc.tensorflow.keras.momentum.keras3 import DGCMomentum as Plain
    from dgc.tensorflow.keras.momentum.keras3 import DGCMomentumLossScale

    return Plain, DGCMomentumLossScale
