"""Horovod's dense allreduce behind the same method as :class:`~dgc.tensorflow.reduce.reducer.Reducer`.

So ``compression=None`` works in all wrappers of this package, also under Keras 3, where Horovod's own optimizer does
not average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dgc.tensorflow.engine.horovod import HOROVOD, CommonNames, gather_slices, import_horovod, is_alone
from dgc.tensorflow.engine.numpy_bridge import ACCUMULATED, APPLY, cross, verdict_of
from dgc.tensorflow.engine.tensors import Variable, raw_variable
from dgc.tensorflow.reduce.step import DEFAULTS, Context, Gradient, GradientReducer, ReduceOptions
from dgc.tensorflow.reduce.sums import adding_step


class DenseReducer(GradientReducer):
    """Averages (or sums) gradients with Horovod's allreduce, for optimizers."""

    def __init__(self, compression: Any = None, options: ReduceOptions = DEFAULTS) -> None:
        """Remember how to reduce; ``compression`` is one of Horovod's, None for ``Compression.none``.

        Raises:
            ConfigError: ``op`` is an unknown text.
        """
        super().__init__(options)
        self._compression, self._op = compression, HOROVOD.reduce_op(options.op)
        self._names = CommonNames("dense")

    def reduce(  # noqa: D102
        self, gradients: list[Gradient], variables: list[Variable], context: Context
    ) -> tuple[list[Gradient], tf.Tensor]:
        names = [""] * len(gradients)
        if not is_alone(self.members):
            names = [self._names.of(raw_variable(v), self.members) for v in variables]
        if self.options.passes == 1:
            return self._reduced(gradients, names)
        self._require_dense_passes(gradients)
        places = [i for i, g in enumerate(gradients) if g is not None]
        added, verdict = cross(adding_step(self._sums), [tf.convert_to_tensor(gradients[i]) for i in places], None)
        # All ranks are in the same pass, so all of them meet in the allreduce or none.
        summed, verdict = tf.cond(
            tf.not_equal(verdict, ACCUMULATED),
            lambda: self._reduced(added, [names[i] for i in places]),
            lambda: ([tf.identity(a) for a in added], verdict),
        )
        results = list(gradients)
        for place, result in zip(places, summed, strict=True):
            results[place] = result
        return results, verdict

    def _reduced(self, gradients: Sequence[Gradient], names: list[str]) -> tuple[list[Gradient], tf.Tensor]:
        reduced = list(gradients)
        if not is_alone(self.members):
            reduced = [None if g is None else self._allreduce(g, n) for g, n in zip(gradients, names, strict=True)]
        return reduced, verdict_of(reduced)

    def _allreduce(self, gradient: Any, name: str) -> Gradient:
        hvd = import_horovod()
        op, members = hvd.Average if self._op is None else self._op, self.members
        if isinstance(gradient, tf.IndexedSlices):
            return gather_slices(gradient, name, members, is_sum=op == hvd.Sum)
        scales, factor = {}, self.options.predivide
        if factor != 1.0:
            op, scales = hvd.Sum, {"prescale_factor": 1.0 / factor, "postscale_factor": factor / self.size}
        # Horovod has no kernel for bfloat16.
        given = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        result = hvd.allreduce(
            given,
            op=op,
            compression=self._compression or hvd.Compression.none,
            process_set=members,
            name=name,
            ignore_name_scope=True,
            **scales,
        )
        return tf.cast(result, gradient.dtype) if result.dtype != gradient.dtype else result


class TapeReducer(GradientReducer):
    """The reduction of Horovod's own tape, with all its options (groups, Adasum, devices)."""

    def __init__(self, tape: Any, options: ReduceOptions) -> None:
        """Reduce as ``tape`` does (of ``hvd.DistributedGradientTape``)."""
        super().__init__(options)
        self._reduce = tape._allreduce_grads

    def reduce(  # noqa: D102
        self, gradients: list[Gradient], variables: list[Variable], context: Context
    ) -> tuple[list[Gradient], tf.Tensor]:
        return list(self._reduce(gradients, variables, context.generic_names)), tf.constant(APPLY, tf.int32)
