"""The exchange's state under torch's parameter numbers, for a state dict in torch's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dgc.adapter.paddle import StateError, check_regularizer, checked_buffer, require_keys

_EXTRAS = ("format", "op", "step", "rank", "size", "sparse_gradients")


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Every parameter with its own name, or one made of its place."""
    named = []
    for g, group in enumerate(groups):
        names = group.get("param_names") or [f"group{g}.{i}" for i in range(len(group["params"]))]
        named += list(zip(names, group["params"], strict=True))
    return named


def numbered(groups: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, torch.Tensor]]:
    """By name, a parameter's number in torch's state dict, and the parameter."""
    return {name: (number, p) for number, (name, p) in enumerate(named_parameters(groups))}


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What every rank must have alike in its groups beside momentum, which is compared in every step.

    Raises:
        ArgumentError: a parameter's own ``regularizer`` is none.
    """
    described: dict[str, Any] = {}
    for i, group in enumerate(groups):
        described[f"learning rate of group {i}"] = float(group["lr"])
        described[f"L1 and L2 decay of group {i}"] = [group["l1_decay"], group["l2_decay"]]
    for name, p in named_parameters(groups):
        own = check_regularizer(getattr(p, "regularizer", None), f"the regularizer of {name!r}")
        if own is not None:
            described[f"regularizer of {name}"] = repr(own)
    return described


def to_torch(state: Mapping[str, Any], numbers: Mapping[str, tuple[int, torch.Tensor]]) -> dict[str, Any]:
    """What an exchange's ``state_dict()`` returned, as tensors in the parameters' shapes."""
    entries = {}
    for name, buffers in state["parameters"].items():
        number, p = numbers[name]
        entries[number] = {
            key: torch.from_numpy(np.array(value)).view(p.shape if key in ("u", "v") else -1)
            for key, value in buffers.items()
        }
    return {"state": dict(sorted(entries.items())), **{key: state[key] for key in _EXTRAS if key in state}}


def from_torch(saved: Mapping[str, Any], numbers: Mapping[str, tuple[int, torch.Tensor]]) -> dict[str, Any]:
    """The inverse of :func:`to_torch`.

    Raises:
        StateError: a key is missing, or a buffer has another shape.
        RuntimeError: a buffer is neither a tensor nor an array.
    """
    require_keys(saved, ("state", "step", "rank", "size", "format"))
    names = {number: (name, p) for name, (number, p) in numbers.items()}
    parameters = {}
    for number, entry in saved["state"].items():
        name, p = names[number]
        parameters[name] = {key: _array(name, key, value, p) for key, value in entry.items()}
    return {"parameters": parameters, **{key: saved[key] for key in _EXTRAS if key in saved}}


def check_groups(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state dict of other groups.

    Raises:
        StateError: another number of groups, or of parameters in a group.
    """
    there = [len(group["params"]) for group in saved.get("param_groups", ())]
    here = [len(group["params"]) for group in groups]
    if there != here:
        raise StateError(f"the state dict has groups of {there} parameters, the optimizer of {here}")


def _array(name: str, key: str, value: Any, p: torch.Tensor) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    wanted = np.float64 if p.dtype is torch.float64 else np.float32
    return checked_buffer(name, key, value, [tuple(p.shape)], wanted, "a tensor or an array")
