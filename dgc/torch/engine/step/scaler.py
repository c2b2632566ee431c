"""A ``GradScaler`` that the compressor was not told of.

Momentum, decay and residuals then mix gradients of different scales: nothing fails, the model only learns worse.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from dgc.torch.engine.step.callers import frames

_FRAMES = 12

_Scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
"""Where torch has it: ``torch.amp`` since 2.3."""


def warn_of_unknown_scaler() -> bool:
    """Warn if a scaler steps the optimizer that is about to step; returns whether one does.

    No error: a script may divide its gradients by the scale before they are exchanged.
    """
    for frame in frames(_FRAMES):
        found = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(found, _Scaler) and found.is_enabled():
            warnings.warn(
                "a GradScaler steps this optimizer, and the compressor does not know its scale: unless gradients are "
                "divided by it before they are exchanged, momentum, weight decay and residuals mix gradients of "
                "different scales. Pass it to the compressor: Compression.dgc(loss_scale=scaler)",
                RuntimeWarning,
                stacklevel=4,
            )
            return True
    return False
