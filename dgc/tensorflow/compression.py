"""``Compression``: Horovod's own algorithms and ours under one name, as users of Horovod expect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgc.adapter.compression import CompressionBase, checked_tensors, refused_uncalled, require_momentum_source
from dgc.core.config.checks import brief
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod.horovod import HOROVOD
from dgc.tensorflow.engine.optimizers import Optimizer, family
from dgc.tensorflow.engine.tensors import Variable


class TensorFlowCompression(CompressionBase):
    """Values of ``compression=``; ``none`` and ``fp16`` are Horovod's.

    A compressor's first argument is ``variables``, those of a built model. Momentum and Nesterov are taken out of an
    SGD; Keras' ``weight_decay`` is decoupled from the gradient and stays in the optimizer. A tape does not know its
    optimizer, so for a tape ``optimizer`` is given without variables. ``loss_scale`` takes a LossScaleOptimizer, too.
    """

    @refused_uncalled
    def dgc(  # noqa: D102
        self, variables: Sequence[Variable] | None = None, optimizer: Optimizer | None = None, **options: Any
    ) -> DGCCompressor:
        return self._make("dgc", variables, optimizer, **options)

    def _make(
        self,
        algorithm: str,
        variables: Sequence[Variable] | None = None,
        optimizer: Optimizer | None = None,
        *,
        members: Any = None,
        **options: Any,
    ) -> DGCCompressor:
        given = None
        if variables is not None:
            advice = "model.trainable_variables of a built model"
            given = checked_tensors(variables, algorithm, "variables", advice)
        if optimizer is not None and family(optimizer) is None:
            raise ConfigError(f"optimizer is {brief(optimizer)}; give a Keras optimizer, or one of tf.compat.v1.train")
        compressor = DGCCompressor(options, algorithm, members)
        if given is None:
            if optimizer is not None:
                compressor.adopt(optimizer)
            return compressor
        require_momentum_source(optimizer, compressor.config, "variables")
        compressor.bind(given, optimizer)
        return compressor


Compression = TensorFlowCompression(HOROVOD)
