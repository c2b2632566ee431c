"""``Compression``: Horovod's own algorithms and ours under one name, as users of Horovod expect it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dgc.adapter.compression import CompressionBase, checked_tensors, require_momentum_source
from dgc.errors import ConfigError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.engine.horovod.horovod import HOROVOD

_ADVICE = "model.named_parameters()"

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class TorchCompression(CompressionBase):
    """What ``compression=`` takes. ``none`` and ``fp16`` are Horovod's.

    A compressor's first argument is ``named_parameters``, as in Horovod's wrappers: torch's parameters carry no names.
    Momentum, Nesterov and weight decay are taken out of a ``torch.optim.SGD``. ``loss_scale`` takes a GradScaler, too.
    """

    def dgc(  # noqa: D102
        self,
        named_parameters: NamedParameters | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> DGCCompressor:
        return self._make("dgc", named_parameters, optimizer, **options)

    def _make(
        self,
        algorithm: str,
        named_parameters: NamedParameters | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        members: Any = None,
        **options: Any,
    ) -> DGCCompressor:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer")
        named = None if named_parameters is None else _checked_names(named_parameters, algorithm)
        compressor = DGCCompressor(options, algorithm, members)
        if named is None:
            if optimizer is not None:
                raise ConfigError(f"Compression.{algorithm}(optimizer=...) also needs named_parameters={_ADVICE}")
            return compressor
        require_momentum_source(optimizer, compressor.config, "named_parameters")
        compressor.bind(named, optimizer)
        return compressor


def _checked_names(value: Any, algorithm: str) -> list[tuple[str, torch.Tensor]]:
    named = checked_tensors(value, algorithm, "named_parameters", _ADVICE)
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ConfigError(f"Compression.{algorithm} needs (name, parameter) pairs: pass {_ADVICE}")
    return named


Compression = TorchCompression(HOROVOD)
