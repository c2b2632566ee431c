"""Give ranks that have joined, and whose scheduler does not run, the options of a rank that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dgc.core.collectives import Transport, gather_values
from dgc.core.exchange.step import Step
from dgc.torch.adoption import Adoption


def share_options(
    transport: Transport,
    step: Step,
    adoption: Adoption,
    optimizer: torch.optim.Optimizer,
    update_follows: bool,
) -> bool:
    """Copy the optimizer's options from a rank that trains to the ranks that have joined. Collective.

    Return the value of ``update_follows`` on the rank that trains.
    """
    with adoption.shown(optimizer):
        rows = gather_values(transport, [update_follows, option_values(optimizer)])
        trains, options = rows[min(set(range(transport.size)) - set(step.joined))]
        if transport.rank in step.joined:
            set_option_values(optimizer, options)
            adoption.read(optimizer, step.number)
            step.hyper = adoption.hyper.chosen(range(len(adoption.hyper.momentum)))
    return bool(trains)


def option_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the options of all groups in a fixed order, for JSON: numbers, and None for anything else."""
    return [_number(group[name]) for group in optimizer.param_groups for name in optimizer.defaults]


def constant_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options that must be equal on all ranks, except for the learning rate, which each step compares."""
    return {
        f"{name} of group {i}": _number(group.get(name))
        for i, group in enumerate(optimizer.param_groups)
        for name in optimizer.defaults
        if name not in ("lr", "foreach", "fused")
    }


def set_option_values(optimizer: torch.optim.Optimizer, values: Sequence[Any]) -> None:
    """Overwrite the numbers in all groups' options with those that :func:`option_values` returned on another rank."""
    left = iter(values)
    for group in optimizer.param_groups:
        for name in optimizer.defaults:
            group[name] = _overwritten(group[name], next(left))


def _number(value: object) -> Any:
    if isinstance(value, tuple):
        return list(map(_number, value))
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.floating):
        return float(value)
    return value if isinstance(value, (int, float)) else None


def _overwritten(own: object, came: Any) -> Any:
    if isinstance(own, tuple):
        return tuple(map(_overwritten, own, came))
    if isinstance(own, torch.Tensor):
        return own.copy_(torch.as_tensor(came))
    return own if came is None else came
