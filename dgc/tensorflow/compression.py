"""``Compression``: Horovod's own algorithms and ours under one name, as users of Horovod expect it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dgc.adapter.compression import constructor
from dgc.core.compressors.registry import compressor_names
from dgc.errors import ConfigError
from dgc.tensorflow.compressor import DGCCompressor
from dgc.tensorflow.horovod import import_horovod
from dgc.tensorflow.optimizers import family


class _Compression:
    """What ``compression=`` takes. ``none`` and ``fp16`` are Horovod's."""

    @property
    def none(self) -> Any:
        """Horovod's: gradients travel as they are."""
        return import_horovod(initialized=False).Compression.none

    @property
    def fp16(self) -> Any:
        """Horovod's: gradients travel as float16."""
        return import_horovod(initialized=False).Compression.fp16

    @staticmethod
    def dgc(variables: Sequence[Any] | None = None, optimizer: Any = None, **options: Any) -> DGCCompressor:
        """Deep Gradient Compression: send the largest accumulated entries, keep the rest for later.

        Way A, for stock Horovod: give ``variables`` and ``optimizer`` (all ranks together).
        Way B, for the wrappers of this package: give options only, and ``optimizer`` for a tape.

        Args:
            variables: ``model.trainable_variables`` of a built model.
            optimizer: the optimizer whose variables are compressed; momentum and Nesterov are taken out of an SGD and
                applied by the compressor. Required in way A and for a tape unless ``momentum`` is given.
            **options: ``momentum, nesterov`` (None: adopt, else 0), ``weight_decay`` (added to the gradient; Keras'
                own, decoupled one stays in the optimizer), ``momentum_masking=True``,
                ``sparsity=0.999`` (a number or a list walked through during ramp-up), ``rampup_begin_step=0``,
                ``rampup_step=1``, ``local_grad_clip_norm=None``, ``clip_scope="tensor"``, ``min_numel=1024``,
                ``include=()``, ``exclude=()``, ``indices="uint16"``, ``values="float16"``, ``bucket_bytes=25 MiB``,
                ``transport="auto"``, ``loss_scale=1.0`` (a number, a function or a LossScaleOptimizer),
                ``op=Average``, ``process_set=None``, ``seed=0``, ``discardable=False`` (True: ``discard_step()`` takes
                back a step that was exchanged and not applied; costs the memory of residuals and momentum once more).

        Raises:
            TypeError: an unknown option; the message lists the valid ones.
            ConfigError: an option out of range, momentum applied twice, or Horovod not initialised.
            LayoutError: ranks disagree about variables.

        Source: Lin et al. 2018, arXiv 1712.01887.
        """
        return _make("dgc", variables, optimizer, **options)

    def __getattr__(self, name: str) -> Any:
        """``Compression.<name>(...)`` of every other compressor, with the arguments of :meth:`dgc` and its own options.

        Raises:
            AttributeError: there is no such compressor; the message lists those there are.
        """
        return constructor(name, self, _make)

    def __dir__(self) -> list[str]:
        return ["none", "fp16", *compressor_names()]


def _make(
    algorithm: str,
    variables: Sequence[Any] | None = None,
    optimizer: Any = None,
    *,
    members: Any = None,
    **options: Any,
) -> DGCCompressor:
    if variables is not None and (isinstance(variables, str) or not isinstance(variables, Iterable)):
        raise ConfigError(
            f"the variables are {variables!r}; pass model.trainable_variables, and options by their names: "
            f"Compression.{algorithm}(sparsity=0.999)"
        )
    if optimizer is not None and family(optimizer) is None:
        raise ConfigError(f"optimizer is {optimizer!r}; give a Keras optimizer, or one of tf.compat.v1.train")
    compressor = DGCCompressor(options, algorithm, members)
    if variables is None:
        if optimizer is not None:
            compressor.adopt(optimizer)
        return compressor
    if optimizer is None and compressor.config.momentum is None:
        raise ConfigError(
            f"Compression.{algorithm}(variables) also needs optimizer=, to take its momentum over; pass it, or "
            "momentum=0 for plain error feedback"
        )
    variables = list(variables)
    if not variables:
        raise ConfigError("no variables to compress: build the model first (call it once, or model.build(...))")
    compressor.bind(variables, optimizer)
    return compressor


Compression = _Compression()
