"""Horovod's dense allreduce behind the same method as :class:`~dgc.tensorflow.reduce.reducer.Reducer`.

So ``compression=None`` works in all wrappers of this package, also under Keras 3, where Horovod's own optimizer does
not average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dgc.errors import ConfigError
from dgc.tensorflow.engine.horovod.horovod import HOROVOD, import_horovod, is_alone
from dgc.tensorflow.engine.numpy_bridge import APPLY, REFUSED
from dgc.tensorflow.engine.tensors import unique_names
from dgc.tensorflow.reduce.options import ReduceOptions


class DenseReducer:
    """Averages (or sums) gradients with Horovod.

    Attributes:
        compression: None: there is no compressor of ours.
        passes: 1.
    """

    compression = None
    passes = 1

    def __init__(self, compression: Any, options: ReduceOptions) -> None:
        """Remember how to reduce.

        Args:
            compression: Horovod's ``Compression.none`` or ``Compression.fp16``; None for the first.
            options: how, in one pass.

        Raises:
            ConfigError: ``passes`` is not 1, or ``op`` is an unknown text.
        """
        if options.passes != 1:
            raise ConfigError("accumulating gradients over several steps needs compression=Compression.dgc(...)")
        self._compression, self._op, self._process_set = compression, HOROVOD.reduce_op(options.op), options.process_set
        self._sparse_as_dense = options.sparse_as_dense

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any = None
    ) -> tuple[list[Any], tf.Tensor]:
        """Reduce one step's gradients: see :meth:`dgc.tensorflow.reduce.reducer.Reducer.reduce`."""
        hvd = import_horovod()
        reduced = list(gradients)
        if not is_alone(self._process_set):
            names = unique_names(list(variables))
            reduced = [None if g is None else self._reduced(hvd, g, n) for g, n in zip(gradients, names, strict=True)]
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in reduced if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
        return reduced, tf.where(finite, tf.constant(APPLY, tf.int32), tf.constant(REFUSED, tf.int32))

    def _reduced(self, hvd: Any, gradient: Any, name: str) -> Any:
        if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        return hvd.allreduce(
            gradient,
            op=hvd.Average if self._op is None else self._op,
            compression=self._compression or hvd.Compression.none,
            process_set=self._process_set or hvd.global_process_set,
            name="dgc_dense_" + name.replace("/", "_").replace("#", "_"),
            ignore_name_scope=True,
        )
