"""Read from a ``GradScaler`` its scale, and whether it has divided gradients already."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from dgc.torch.horovod import stepping_scaler

Later = Callable[[], torch.Tensor]


def read_scale(scaler: Any) -> float | Callable[[], float]:
    """Return the scale of this step's gradients. If the scaler is on a GPU, return a function that waits for it."""
    scale = getattr(scaler, "_scale", None)
    if not (isinstance(scale, torch.Tensor) and scale.is_cuda and scaler.is_enabled()):
        return scaler.get_scale()
    value = read_later(scale)
    return lambda: float(value())


def read_later(tensor: torch.Tensor) -> Later:
    """Begin to copy a small tensor from a GPU, and return a function that waits for the copy without spinning."""
    if not tensor.is_cuda:
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(tensor.device))

    def copied() -> torch.Tensor:
        event.synchronize()
        return host

    return copied


def steps_by_scaler() -> bool:
    """Return whether a GradScaler calls the ``step()`` that is about to run."""
    scaler = stepping_scaler(torch.amp.GradScaler)
    return scaler is not None and scaler.is_enabled()


def has_unscaled(scaler: object, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler has divided the gradients of an optimizer since its latest ``update()``."""
    states = scaler._per_optimizer_states if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else {}
    return bool(states.get(id(optimizer), {}).get("found_inf_per_device"))


def warn_of_unknown_scaler() -> None:
    """Warn that a scaler steps an optimizer. This is no error: a script may divide gradients before the exchange."""
    warnings.warn(
        "a GradScaler steps this optimizer, and the compressor does not know its scale: unless gradients are "
        "divided by it before they are exchanged, momentum, weight decay and residuals mix gradients of "
        "different scales. Pass it to the compressor: Compression.dgc(loss_scale=scaler)",
        RuntimeWarning,
        stacklevel=3,
    )
