"""``Compression``: Horovod's own algorithms and ours under one name, as users of Horovod expect it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dgc.adapter.compression import constructor
from dgc.core.compressors.registry import compressor_names
from dgc.errors import ConfigError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.horovod import import_horovod


class _Compression:
    """What ``compression=`` takes. ``none`` and ``fp16`` are Horovod's."""

    @property
    def none(self) -> Any:
        """Horovod's: gradients travel as they are."""
        return import_horovod().Compression.none

    @property
    def fp16(self) -> Any:
        """Horovod's: gradients travel as float16."""
        return import_horovod().Compression.fp16

    @staticmethod
    def dgc(
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> DGCCompressor:
        """Deep Gradient Compression: send the largest accumulated entries, keep the rest for later.

        Way A, for stock ``hvd.DistributedOptimizer``: give ``named_parameters`` and ``optimizer`` (all ranks together).
        Way B, for ``dgc.torch.DistributedOptimizer``: give options only; the wrapper binds the rest.

        Args:
            named_parameters: ``model.named_parameters()``.
            optimizer: the optimizer whose parameters are compressed; momentum, Nesterov and weight decay are taken out
                of a ``torch.optim.SGD`` and applied by the compressor. Required in way A unless ``momentum`` is given.
            **options: ``momentum, nesterov, weight_decay`` (None: adopt, else 0), ``momentum_masking=True``,
                ``sparsity=0.999`` (a number or a list walked through during ramp-up), ``rampup_begin_step=0``,
                ``rampup_step=1``, ``local_grad_clip_norm=None``, ``clip_scope="tensor"``, ``min_numel=1024``,
                ``include=()``, ``exclude=()``, ``indices="uint16"``, ``values="float16"``, ``bucket_bytes=25 MiB``,
                ``transport="auto"``, ``loss_scale=1.0`` (a number, a function or the GradScaler), ``op=Average``,
                ``process_set=None``, ``seed=0``, ``discardable=False`` (True: a step that was
                synchronized and not applied is taken back wholly by ``zero_grad()`` or ``discard_step()``; costs the
                memory of residuals and momentum once more).

        Raises:
            TypeError: an unknown option; the message lists the valid ones.
            ConfigError: an option out of range, momentum applied twice, or Horovod not initialised.
            LayoutError: ranks disagree about parameters.

        Source: Lin et al. 2018, arXiv 1712.01887.
        """
        return _make("dgc", named_parameters, optimizer, **options)

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
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    members: Any = None,
    **options: Any,
) -> DGCCompressor:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer")
    compressor = DGCCompressor(options, algorithm, members)
    if named_parameters is None:
        if optimizer is not None:
            raise ConfigError(
                f"Compression.{algorithm}(optimizer=...) also needs named_parameters=model.named_parameters()"
            )
        return compressor
    if optimizer is None and compressor.config.momentum is None:
        raise ConfigError(
            f"Compression.{algorithm}(named_parameters) also needs optimizer=, to take its momentum and weight decay "
            "over; pass it, or momentum=0 for plain error feedback"
        )
    compressor.bind(named_parameters, optimizer)
    return compressor


Compression = _Compression()
