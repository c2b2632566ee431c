"""The exchange's state under torch's parameter numbers, for a state dict in torch's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dgc.adapter.paddle import StateError, check_regularizer, flat, require_keys, shaped

_EXTRAS = ("format", "op", "step", "rank", "size")

Named = Sequence[tuple[str, torch.Tensor]]
"""(name, parameter) by parameter number."""


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> Named:
    """Every parameter with its own name, or one made of its place."""
    named: list[tuple[str, torch.Tensor]] = []
    for g, group in enumerate(groups):
        names = group.get("param_names") or [f"group{g}.{i}" for i in range(len(group["params"]))]
        named += zip(names, group["params"], strict=True)
    return named


def describe(groups: Sequence[Mapping[str, Any]], named: Named) -> dict[str, Any]:
    """What every rank must have alike beside momentum, which is compared in every step.

    Raises:
        ArgumentError: a parameter's own ``regularizer`` is none.
    """
    described: dict[str, Any] = {}
    for i, group in enumerate(groups):
        described[f"learning rate of group {i}"] = float(group["lr"])
        described[f"L1 and L2 decay of group {i}"] = [group["l1_decay"], group["l2_decay"]]
    for name, p in named:
        own = check_regularizer(getattr(p, "regularizer", None), f"the regularizer of {name!r}")
        if own is not None:
            described[f"regularizer of {name}"] = repr(own)
    return described


def to_torch(state: Mapping[str, Any], named: Named) -> dict[str, Any]:
    """What an exchange's ``state_dict()`` returned, as tensors in the parameters' shapes."""
    parameters = shaped(state["parameters"], _shapes(named))
    entries = {
        number: {key: torch.from_numpy(np.array(value)) for key, value in parameters[name].items()}
        for number, (name, _) in enumerate(named)
        if name in parameters
    }
    return {"state": entries, **{key: state[key] for key in _EXTRAS if key in state}}


def from_torch(saved: Mapping[str, Any], named: Named) -> dict[str, Any]:
    """The inverse of :func:`to_torch`.

    Raises:
        StateError: a key is missing, or a buffer has another shape.
        RuntimeError: a buffer is neither a tensor nor an array.
    """
    require_keys(saved, ("state", "step", "rank", "size", "format"))
    parameters = {
        named[number][0]: {k: v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in entry.items()}
        for number, entry in saved["state"].items()
    }
    wide = {n: np.dtype(np.float64 if p.dtype is torch.float64 else np.float32) for n, p in named}
    checked = flat(parameters, _shapes(named), wide, "a tensor or an array")
    return {"parameters": checked, **{key: saved[key] for key in _EXTRAS if key in saved}}


def _shapes(named: Named) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in named}


def check_groups(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state dict of other groups.

    Raises:
        StateError: another number of groups, or of parameters in a group.
    """
    there = [len(group["params"]) for group in saved.get("param_groups", ())]
    here = [len(group["params"]) for group in groups]
    if there != here:
        raise StateError(f"the state dict has groups of {there} parameters, the optimizer of {here}")
