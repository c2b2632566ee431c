"""An optimizer for one of the variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from evidence.application import EvidenceError


def take_first_moment(optimizer: torch.optim.Optimizer) -> float | None:
    """Move Adam's first moment elsewhere: its beta1 becomes 0, and is returned; None where the optimizer has no betas.

    Raises:
        EvidenceError: parameter groups differ in it.
    """
    betas = [group["betas"] for group in optimizer.param_groups if "betas" in group]
    if not betas:
        return None
    if len({first for first, _ in betas}) > 1:
        raise EvidenceError("the parameter groups have different beta1: a compressor has one momentum")
    for group in optimizer.param_groups:
        group["betas"] = (0.0, group["betas"][1])
    return float(betas[0][0])


class SeparateDecay(torch.optim.Optimizer):
    """``w <- p's decay velocity: m*w + decay*p; p <- p - lr*(gradient + w)``, where the gradient has its momentum.

    For a compressor that corrects the momentum of the loss' gradient alone, as the paper's formulas do: weight decay is
    known to every rank, so it needs no exchange, and none of it waits in a residual. With gradients that are never
    sparsified this is SGD with momentum and weight decay, since both are linear.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1, decay: float = 0.0, decay_momentum: float = 0.9) -> None:
        """Keep the options; Horovod builds its own optimizer from the parameter groups alone.

        Args:
            params: as of every optimizer.
            lr: learning rate.
            decay: weight decay.
            decay_momentum: momentum of the decay; the gradients' own is the compressor's.
        """
        super().__init__(params, {"lr": lr, "decay": decay, "decay_momentum": decay_momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; returns what ``closure`` returned."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                velocity = self.state[parameter].setdefault("decay_velocity", torch.zeros_like(parameter))
                velocity.mul_(group["decay_momentum"]).add_(parameter, alpha=group["decay"])
                parameter.add_(parameter.grad + velocity, alpha=-group["lr"])
        return result
