"""What a sharded optimizer may be built from, and what is refused before any rank waits for another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from dgc.core.errors import ConfigError, LayoutError


def checked_groups(params: Any) -> list[dict[str, Any]]:
    """Parameters in any form that torch optimizers take, as a list of group dicts.

    Args:
        params: an iterable (a generator, too) of tensors, of (name, tensor) pairs, or of group dicts.

    Raises:
        TypeError: a tensor or something else that is no collection of tensors; tensors and dicts mixed.
        LayoutError: (a ValueError) no parameters, a group without ``"params"``, a sparse parameter, or parameters of
            different types.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError("params is a single Tensor; give an iterable of tensors or of group dicts, such as [tensor]")
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes, dict)):
        raise TypeError(f"params is a {type(params).__name__}; give an iterable of tensors or of group dicts")
    items = list(params)
    if not items:
        raise LayoutError("the optimizer got an empty parameter list; give model.parameters()")
    if all(isinstance(item, dict) for item in items):
        groups = items
    elif any(isinstance(item, dict) for item in items):
        raise TypeError("params mixes tensors and group dicts; give one or the other")
    else:
        groups = [{"params": items}]
    for group in groups:
        group["params"] = _tensors_of(group)
    require_one_dense_type([t for group in groups for t in map(tensor_of, group["params"])])
    return groups


def tensor_of(item: Any) -> torch.Tensor:
    """The tensor of a group's member, which may be a (name, tensor) pair."""
    return item[1] if isinstance(item, tuple) else item


def require_one_dense_type(tensors: list[torch.Tensor]) -> None:
    """Refuse sparse tensors and mixtures of types.

    Raises:
        LayoutError: names the first that differs.
    """
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise LayoutError(f"parameter number {i} is {tensor.layout}; only dense parameters can be sharded")
        if tensor.type() != tensors[0].type():
            raise LayoutError(
                f"parameter number {i} is a {tensor.type()}, the first one a {tensors[0].type()}; build one optimizer "
                "for each type"
            )


def checked_class(optimizer_class: Any) -> type[Optimizer]:
    """The class of the local optimizers.

    Raises:
        TypeError: missing, or not a class.
        ConfigError: (a ValueError) a class that is no torch optimizer, such as torch's functional ones.
    """
    if optimizer_class is None:
        raise TypeError("ZeroRedundancyOptimizer needs optimizer_class, such as torch.optim.Adam")
    if not isinstance(optimizer_class, type):
        raise TypeError(f"optimizer_class is a {type(optimizer_class).__name__}; give a class such as torch.optim.Adam")
    if not issubclass(optimizer_class, Optimizer):
        raise ConfigError(
            f"optimizer_class is {optimizer_class.__name__}, which is no torch.optim.Optimizer; functional optimizers "
            "exist to overlap with torch's DDP, which is not used here: give the ordinary class"
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ConfigError("LBFGS needs all parameters in one place and cannot be sharded; use it as it is")
    return optimizer_class


def chosen_set(group: Any, process_group: Any, process_set: Any) -> Any:
    """The one process set among three names for the same argument; None for all ranks.

    Raises:
        ConfigError: given twice.
        TypeError: not a Horovod process set.
    """
    given = [value for value in (group, process_group, process_set) if value is not None]
    if len(given) > 1:
        raise ConfigError("group, process_group and process_set mean the same; give one of them")
    if given and not hasattr(given[0], "process_set_id"):
        raise TypeError(
            f"group is a {type(given[0]).__name__}; ranks are Horovod's here: give a horovod.torch.ProcessSet, or None "
            "for all ranks"
        )
    return given[0] if given else None


def _tensors_of(group: dict[str, Any]) -> list[Any]:
    if "params" not in group:
        raise LayoutError(f"a parameter group has no 'params', only {sorted(group)}")
    members = group["params"]
    if isinstance(members, torch.Tensor):
        members = [members]
    if isinstance(members, set):
        raise TypeError("params is a set, whose order differs between ranks; give a list")
    if not isinstance(members, Iterable) or isinstance(members, (str, bytes, dict)):
        raise TypeError(f"params is a {type(members).__name__}; give an iterable of tensors")
    members = list(members)
    for member in members:
        if not isinstance(tensor_of(member), torch.Tensor):
            raise TypeError(f"params contains a {type(member).__name__}; the optimizer can only optimize tensors")
    return members
