"""When a compressor applies momentum in the sharded optimizer's place.

Momentum correction is every rank's own and for all parameters, so a checkpoint's momentum must reach every rank whole;
a share of it would reach one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgc.torch.zero import checkpoints
from dgc.torch.zero.groups import parameters_of


def momentum_is_adopted(optimizer: Any) -> bool:
    """Whether the optimizer was wrapped together with a compressor that takes its momentum."""
    compressor = getattr(optimizer, "_dgc", None) or getattr(optimizer, "_compression", None)
    engine = getattr(compressor, "engine", None)
    return engine is not None and engine.adoption.active


def hand_over_momentum(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Leave the momentum buffers of all parameters where the compressor of every rank looks for them.

    Args:
        optimizer: the sharded one; its share of the buffers is taken out of its local optimizer.
        saved: a full state dict, not changed.
    """
    for number, p in enumerate(parameters_of(optimizer.param_groups)):
        entry = checkpoints.state_of(saved, number)
        buffer = entry.get("momentum_buffer") if entry else None
        if buffer is not None:
            optimizer.state[p]["momentum_buffer"] = buffer.detach().to(p.device, copy=True)
        if p in optimizer.optim.state:
            optimizer.optim.state[p].pop("momentum_buffer", None)
