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
from dgc.tensorflow.engine.horovod.names import CommonNames, gather_slices
from dgc.tensorflow.engine.numpy_bridge import ACCUMULATED, APPLY, REFUSED, cross
from dgc.tensorflow.engine.tensors import raw_variable
from dgc.tensorflow.reduce.options import DEFAULTS, ReduceOptions
from dgc.tensorflow.reduce.sums import Sums, adding_step


class DenseReducer:
    """Averages (or sums) gradients with Horovod.

    Attributes:
        compression: None: there is no compressor of ours.
        passes: gradients of this many steps are added up before they are reduced.
    """

    compression = None

    def __init__(self, compression: Any = None, options: ReduceOptions = DEFAULTS) -> None:
        """Remember how to reduce.

        Args:
            compression: Horovod's ``Compression.none`` or ``Compression.fp16``; None for the first.
            options: how.

        Raises:
            ConfigError: ``passes`` is no whole number >= 1, or ``op`` is an unknown text.
        """
        self._sums = Sums(options.passes, options.average_passes)
        self.passes = options.passes
        self._compression, self._op, self._process_set = compression, HOROVOD.reduce_op(options.op), options.process_set
        self._sparse_as_dense, self._predivide = options.sparse_as_dense, options.predivide
        self._names = CommonNames("dense")

    @property
    def size(self) -> int:
        """Ranks that take part; 1 where there is nobody else."""
        return 1 if is_alone(self._process_set) else HOROVOD.chosen_set(self._process_set).size()

    def stand_beside_local(self, variables: Sequence[Any], optimizer: Any = None) -> None:
        """The momentum is in the optimizer, which updates local variables, too."""

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any = None, dense_for: str | None = None
    ) -> tuple[list[Any], tf.Tensor]:
        """Reduce one step's gradients: see :meth:`dgc.tensorflow.reduce.reducer.Reducer.reduce`."""
        given = list(gradients)
        if self._sparse_as_dense:
            given = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in given]
        names = [""] * len(given)
        if not is_alone(self._process_set):
            members = HOROVOD.chosen_set(self._process_set)
            names = [self._names.of(raw_variable(v), members) for v in variables]
        if self.passes == 1:
            return self._reduced_all(given, names)
        if any(isinstance(g, tf.IndexedSlices) for g in given):
            raise ConfigError(
                "backward_passes_per_step > 1 (gradient accumulation) cannot add up sparse gradients; pass "
                "sparse_as_dense=True"
            )
        places = [i for i, g in enumerate(given) if g is not None]
        added, verdict = cross(adding_step(self._sums), [tf.convert_to_tensor(given[i]) for i in places], None)

        def reduced() -> tuple[list[Any], tf.Tensor]:
            return self._reduced_all(added, [names[i] for i in places])

        # All ranks are in the same pass, so all of them meet in the allreduce or none.
        is_sum = tf.not_equal(verdict, ACCUMULATED)
        results, verdict = tf.cond(is_sum, reduced, lambda: ([tf.identity(a) for a in added], verdict))
        for place, result in zip(places, results, strict=True):
            given[place] = result
        return given, verdict

    def _reduced_all(self, gradients: list[Any], names: list[str]) -> tuple[list[Any], tf.Tensor]:
        hvd = import_horovod()
        reduced = gradients
        if not is_alone(self._process_set):
            reduced = [None if g is None else self._reduced(hvd, g, n) for g, n in zip(gradients, names, strict=True)]
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in reduced if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
        return reduced, tf.where(finite, tf.constant(APPLY, tf.int32), tf.constant(REFUSED, tf.int32))

    def _reduced(self, hvd: Any, gradient: Any, name: str) -> Any:
        op, members = hvd.Average if self._op is None else self._op, HOROVOD.chosen_set(self._process_set)
        if isinstance(gradient, tf.IndexedSlices):
            return gather_slices(gradient, name, members, is_sum=op == hvd.Sum)
        kind = gradient.dtype
        if kind == tf.bfloat16:  # Horovod has no kernel for it
            gradient = tf.cast(gradient, tf.float32)
        scales = {}
        if self._predivide != 1.0:
            op, scales = (
                hvd.Sum,
                {
                    "prescale_factor": 1.0 / self._predivide,
                    "postscale_factor": self._predivide / self.size,
                },
            )
        result = hvd.allreduce(
            gradient,
            op=op,
            compression=self._compression or hvd.Compression.none,
            process_set=members,
            name=name,
            ignore_name_scope=True,
            **scales,
        )
        return tf.cast(result, kind) if result.dtype != kind else result
