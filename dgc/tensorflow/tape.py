"""``DistributedGradientTape``, with Horovod's arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dgc.adapter.checks import refuse_grouping
from dgc.adapter.compressor import check_compression, horovods
from dgc.adapter.options import Compressing
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor, require_classic
from dgc.tensorflow.horovod import HOROVOD, ProcessSet, ReduceOp, import_horovod, is_alone
from dgc.tensorflow.reduce import Reducer
from dgc.tensorflow.tensors import Variable, raw_variable


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = None,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet | None = None,
) -> tf.GradientTape:
    """Return a tape whose ``gradient()`` returns gradients reduced over all ranks.

    The arguments are those of ``horovod.tensorflow.DistributedGradientTape``. With ``compression=Compression.dgc(...)``
    the gradients are sent compressed. Any other compression is passed to Horovod. Build the compressor once, outside
    the training step; a tape may be wrapped in each step.

    Raises:
        ConfigError: with dgc's compressor, ``op`` is Adasum or differs from the compressor's, groups are given, or the
            compressor has neither a momentum nor an optimizer to take momentum from.
    """
    hvd = import_horovod()
    texts = {"device_dense": device_dense, "device_sparse": device_sparse}
    check_compression(compression, DGCCompressor, "dgc.tensorflow", **texts)
    if isinstance(compression, DGCCompressor):
        refuse_grouping(num_groups, groups)
        require_classic(compression.config, "a tape")
        compression.use_op(op, gradient_predivide_factor)
        _check_optimizer(compression, process_set)
        user = "a DistributedGradientTape"
        reducer = Reducer(compression, process_set=process_set, sparse_as_dense=sparse_as_dense, user=user)

        def reduce(gradients: list[Any], variables: list[Variable], _: bool) -> Sequence[Any]:
            return reducer.reduce(gradients, variables)[0]

    else:
        # Horovod's own tape supports groups, Adasum and devices.
        reduce = hvd.DistributedGradientTape(
            gradtape,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=horovods(compression) or hvd.Compression.none,
            sparse_as_dense=sparse_as_dense,
            op=hvd.Average if op is None else HOROVOD.reduce_op(op),
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set or hvd.global_process_set,
        )._allreduce_grads
    distributed = copy.copy(gradtape)
    cls = type(gradtape)
    distributed.__class__ = type(cls.__name__, (_DistributedTape, cls), {})
    distributed._dgc_reduce, distributed._dgc_seen = reduce, set()
    distributed._dgc_compression = compression if isinstance(compression, DGCCompressor) else None
    return distributed


def _check_optimizer(compression: DGCCompressor, process_set: ProcessSet | None) -> None:
    """Take the optimizer's momentum. Raise an error if the tape lacks an optimizer or a loss scale for it."""
    if compression.adoption is None and compression.optimizer is not None:
        compression.adopt(None, process_set)  # take it again: the optimizer got its momentum back when bind() failed
    adoption = compression.adoption
    if adoption is None:
        if compression.config.momentum is None and not is_alone(process_set):
            raise ConfigError(
                "a tape does not know the optimizer: pass it to the compressor, Compression.dgc(optimizer=optimizer), "
                "so that its momentum is taken over; or pass momentum=0 for plain error feedback"
            )
    elif adoption.is_loss_scaled and "loss_scale" not in compression.given_options:
        raise ConfigError(
            "the optimizer scales the loss, and the momentum and residuals that the compressor keeps from step to step "
            "must not be scaled with it: pass loss_scale=optimizer to the compressor"
        )


class _DistributedTape(tf.GradientTape):
    """A mixin for the class of the user's tape."""

    _dgc_reduce: Callable[[list[Any], list[Variable], bool], Sequence[Any]]
    _dgc_compression: DGCCompressor | None
    _dgc_seen: set[int]

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: object,
        sources: object,
        output_gradients: object = None,
        use_generic_names: bool = False,
        **options: object,
    ) -> Any:
        """Compute the gradients as ``tf.GradientTape.gradient`` does, and reduce them over all ranks.

        ``use_generic_names`` only concerns Horovod's own collectives; dgc's always have such names.
        """
        own = super().gradient(target, sources, output_gradients, **options)
        variables = tf.nest.flatten(sources)
        self._refuse_momentum_twice(set(map(id, map(raw_variable, variables))))
        # With expand_composites=False, tf.IndexedSlices and None are leaves, as the variables are.
        given = tf.nest.flatten(own, expand_composites=False)
        results = self._dgc_reduce(given, variables, use_generic_names)
        return tf.nest.pack_sequence_as(sources, results, expand_composites=False)

    def _refuse_momentum_twice(self, chosen: set[int]) -> None:
        """Refuse a second ``gradient()`` of a persistent tape, because it would apply the momentum a second time."""
        compression = self._dgc_compression
        again = chosen & self._dgc_seen
        self._dgc_seen |= chosen
        engine = None if compression is None else compression.engine
        if again and engine is not None and any(engine.adoption.hyper.momentum):
            engine.fail_in_step(
                ConfigError(
                    "gradient() was called twice on one tape, and the momentum that was taken into the compressor "
                    "would be applied in each call: compute the gradient of the sum of the losses in one call, or pass "
                    "momentum=0 to the compressor to leave momentum in the optimizer"
                )
            )
