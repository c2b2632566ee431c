"""``DistributedGradientTape``: Horovod's, with all gradients of a step handed to the core together."""

from __future__ import annotations

import copy
import functools
from typing import Any

import tensorflow as tf

from dgc.adapter.compression import check_predivide, refuse_adasum, refuse_grouping
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.engine.horovod.horovod import HOROVOD, import_horovod, is_alone
from dgc.tensorflow.engine.tensors import raw_variable
from dgc.tensorflow.reduce.local import LocalVariables, after
from dgc.tensorflow.reduce.options import ReduceOptions
from dgc.tensorflow.reduce.reducer import Reducer
from dgc.tensorflow.reduce.settings import check_compression


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """A tape whose ``gradient()`` returns gradients reduced over all ranks.

    Arguments are those of ``horovod.tensorflow.DistributedGradientTape``. With ``compression=Compression.dgc(...)``
    the gradients travel compressed; any other compression is handed to Horovod as it is. Build the compressor once,
    outside the training step; a tape may be wrapped anew in each step.

    Raises:
        ConfigError: ``op=Adasum``, another op than the compressor's, ``groups``, or a compressor that has neither an
            optimizer to take momentum from nor a momentum of its own.
    """
    hvd = import_horovod()
    check_compression(compression, device_dense=device_dense, device_sparse=device_sparse)
    if not isinstance(compression, DGCCompressor):
        stock = hvd.DistributedGradientTape(
            gradtape,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression or hvd.Compression.none,
            sparse_as_dense=sparse_as_dense,
            op=hvd.Average if op is None else HOROVOD.reduce_op(op),
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set or hvd.global_process_set,
            scale_local_gradients=scale_local_gradients,
        )
        # Horovod makes a class for each tape, whose methods take the one above it for the user's.
        _hand_local_over_last(type(stock))
        return stock
    refuse_grouping(num_groups, groups)
    refuse_adasum(op, HOROVOD)
    check_predivide(gradient_predivide_factor, compression.op_of(op))
    if compression.adoption is None and compression.optimizer is not None:
        compression.adopt(None, process_set)  # it was given back when a binding failed
    if compression.adoption is None and compression.config.momentum is None and not is_alone(process_set):
        raise ConfigError(
            "a tape does not know the optimizer: pass it to the compressor, Compression.dgc(optimizer=optimizer), so "
            "that its momentum is taken over; or pass momentum=0 for plain error feedback"
        )
    _check_optimizer(compression)
    options = ReduceOptions(op, process_set, sparse_as_dense)
    reducer = Reducer(compression, options, user="a DistributedGradientTape")
    distributed = copy.copy(gradtape)
    cls = type(gradtape)
    distributed.__class__ = type(cls.__name__, (_DistributedTape, cls), {})
    distributed._dgc_reducer = reducer
    distributed._dgc_local = LocalVariables(scale_local_gradients)
    distributed._dgc_seen = set()
    return distributed


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """:func:`DistributedGradientTape` that leaves the gradients of some layers on their rank.

    Arguments are those of ``horovod.tensorflow.PartialDistributedGradientTape``; ``local_layers`` is a layer or
    several.

    Raises:
        ConfigError: as there, or ``local_layers`` holds something else than layers.
    """
    several = isinstance(local_layers, (list, tuple, set, frozenset))
    layers = list(local_layers) if several else [] if local_layers is None else [local_layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ConfigError(f"local_layers holds {layer!r}; give Keras layers")
    tape = DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(raw_variable(variable))
    return tape


def _hand_local_over_last(stock: Any) -> None:
    """Let a class of Horovod's tapes, in graphs, hand over local gradients after the exchange."""
    reduced = stock.gradient

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(reduced)
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        results = reduced(tape, target, sources, *args, **options)
        local = [source.ref() in tape._local_sources for source in sources]
        others = [getattr(g, "values", g) for g, own in zip(results, local, strict=True) if not own and g is not None]
        return [after(others, g) if own else g for g, own in zip(results, local, strict=True)]

    stock.gradient = gradient


def _check_optimizer(compression: DGCCompressor) -> None:
    """What a wrapped optimizer takes over itself, and a tape cannot.

    Raises:
        ConfigError: gradient accumulation inside the optimizer, or a loss scale that the compressor does not know.
    """
    adoption = compression.adoption
    if adoption is None or not adoption.active or not adoption.momentum:
        return
    if getattr(adoption.optimizer, "gradient_accumulation_steps", None):
        raise ConfigError(
            "the optimizer accumulates gradients (gradient_accumulation_steps), but behind a tape its momentum would "
            "be applied to each of them; use dgc.tensorflow.DistributedOptimizer, or accumulate them yourself"
        )
    if adoption.is_loss_scaled and not compression.was_given("loss_scale"):
        raise ConfigError(
            "the optimizer scales the loss, and the momentum that was taken over must not be scaled with it: pass "
            "loss_scale=optimizer to the compressor"
        )


class _DistributedTape:
    """Mixed into the class of the user's tape."""

    _dgc_reducer: Reducer
    _dgc_local: LocalVariables
    _dgc_seen: set[int]

    def register_local_source(self, source: Any) -> None:
        """Leave this variable's gradient on its rank."""
        self._dgc_local.add(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """Compute the gradients of ``target`` and reduce them over all ranks.

        Args:
            target: the loss.
            sources: variables, in any nesting.
            output_gradients: as in ``tf.GradientTape.gradient``.
            use_generic_names: accepted for Horovod's sake.
            **options: as in ``tf.GradientTape.gradient``.

        Raises:
            DGCError: ranks or steps differ, or a rank failed.
        """
        local = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        variables = tf.nest.flatten(sources)
        # Without composites, tf.IndexedSlices and None are leaves like the variables.
        gradients = tf.nest.flatten(local, expand_composites=False)
        self._refuse_momentum_twice({id(raw_variable(variables[i])) for i in self._dgc_local.shared(variables)})
        results, _ = self._dgc_local.reduce(self._dgc_reducer, gradients, variables)
        return tf.nest.pack_sequence_as(sources, results, expand_composites=False)

    def _refuse_momentum_twice(self, chosen: set[int]) -> None:
        """A second ``gradient()`` of a persistent tape is a second step of the momentum.

        Raises:
            ConfigError: the compressor applies momentum, and some of these variables had their gradients already.
        """
        compression = self._dgc_reducer.compression
        again, engine = chosen & self._dgc_seen, compression.engine
        self._dgc_seen |= chosen
        if again and engine is not None and any(engine.adoption.hyper.momentum):
            engine.fail_in_step(
                ConfigError(
                    "gradient() was called twice on one tape, and the momentum that was taken into the compressor "
                    "would be applied in each call: compute the gradient of the sum of the losses in one call, or pass "
                    "momentum=0 to the compressor to leave momentum in the optimizer"
                )
            )
