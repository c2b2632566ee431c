"""A checkpoint of several ranks in a job of one process, whose optimizer applies momentum itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dgc.adapter.engine import holds_nothing
from dgc.core.state import resized
from dgc.torch.compressor import DGCCompressor
from dgc.torch.engine.adoption import is_sgd


def take_over(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: DGCCompressor,
    states: Sequence[dict[str, Any]],
) -> None:
    """Give the ranks' mean momentum (of summed gradients: its sum) to the optimizer; what was not sent yet is dropped.

    Args:
        model: its parameters have the names that the state was saved under.
        optimizer: has loaded its own state.
        compression: of a single process.
        states: of all ranks that have saved.

    Warns:
        RuntimeWarning: there is something that is dropped.
    """
    if all(holds_nothing(state) for state in states):
        return
    op = compression.config.op
    whole = resized(states, 0, 1, compression.config.rampup_begin_step, op=op)
    kept = _set_momentum(model, optimizer, whole["parameters"])
    joined = "the mean" if op == "average" else "the sum"
    warnings.warn(
        "one process compresses nothing: what the ranks had not sent yet is dropped"
        + (f"; {joined} of their momentum is the optimizer's now" if kept else ", and their momentum"),
        RuntimeWarning,
        stacklevel=4,
    )


def _set_momentum(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> bool:
    """Turn u into momentum buffers where the optimizer would have some; returns whether all of them found a place."""
    if not is_sgd(optimizer):
        return True
    named, missing = dict(model.named_parameters()), False
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, entry in saved.items():
        parameter = named.get(name)
        group = {} if parameter is None else options.get(id(parameter), {})
        if parameter is None or parameter.numel() != entry["u"].size:
            missing = True
        elif group.get("momentum") and optimizer.state[parameter].get("momentum_buffer") is None:
            buffer = torch.from_numpy(entry["u"]).reshape(parameter.shape)
            optimizer.state[parameter]["momentum_buffer"] = buffer.to(parameter)
    return not missing
