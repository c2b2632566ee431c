"""A ``GradScaler`` that the compressor was not told of.

Momentum, decay and residuals would mix gradients of different scales: nothing fails, the model only learns worse.
"""

from __future__ import annotations

import sys

import torch

from dgc.errors import ConfigError

_FRAMES = 12


def refuse_unknown_scaler() -> None:
    """Look whether a scaler steps the optimizer that is about to step, where the compressor was given no loss scale.

    Raises:
        ConfigError: it does; on every rank, since all step alike, and before anything is updated.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        found = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(found, torch.amp.GradScaler) and found.is_enabled():
            raise ConfigError(
                "a GradScaler steps this optimizer, and the compressor does not know its scale, so residuals and "
                "momentum would mix gradients of different scales; pass it to the compressor: "
                "Compression.dgc(loss_scale=scaler)"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
