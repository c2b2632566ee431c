"""Give ranks that have joined, and so have no schedule to follow, the options of a rank that trains."""

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
    updates: bool,
) -> bool:
    """Give ranks that have joined the options of one that trains. Collective."""
    with adoption.shown(optimizer):
        rows = gather_values(transport, [updates, option_values(optimizer)])
        trains, options = rows[min(set(range(transport.size)) - set(step.joined))]
        if transport.rank in step.joined:
            set_option_values(optimizer, options)
            adoption.read(optimizer, step.number)
            step.hyper = adoption.hyper.chosen(range(len(adoption.hyper.momentum)))
    return bool(trains)


def option_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The numbers among all groups' options for JSON, in a fixed order; None in the place of anything else."""
    return [_number(group[name]) for group in optimizer.param_groups for name in optimizer.defaults]


def set_option_values(optimizer: torch.optim.Optimizer, values: Sequence[Any]) -> None:
    """Overwrite the numbers among all groups' options by what :func:`option_values` returned on another rank."""
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
