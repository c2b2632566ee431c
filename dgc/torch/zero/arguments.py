"""What a sharded optimizer may be built from, and what is refused before any rank waits for another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError
from dgc.torch.momentum.optimizer import DGCMomentum
from dgc.torch.zero.separate import require_separate
from dgc.transport.choice import CHOICES


def checked_groups(params: Any) -> list[dict[str, Any]]:
    """Parameters in any form that torch optimizers take, as a list of group dicts.

    Args:
        params: an iterable (a generator, too) of tensors, of (name, tensor) pairs, or of group dicts.

    Raises:
        TypeError: a tensor, a set, or something else that is no ordered collection of tensors; tensors and dicts mixed.
        LayoutError: (a ValueError) no parameters, a group without ``"params"``, a sparse or complex parameter,
            parameters of different types, one that is listed twice in a group, or two in the same memory.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError("params is a single Tensor; give an iterable of tensors or of group dicts, such as [tensor]")
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes, dict)):
        raise TypeError(f"params is a {type(params).__name__}; give an iterable of tensors or of group dicts")
    _require_order(params)
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
    require_shardable([item for group in groups for item in group["params"]])
    return groups


def tensor_of(item: Any) -> torch.Tensor:
    """The tensor of a group's member, which may be a (name, tensor) pair."""
    return item[1] if isinstance(item, tuple) else item


def require_shardable(items: Sequence[Any]) -> None:
    """Refuse parameters that ranks cannot own one by one.

    Args:
        items: tensors or (name, tensor) pairs, of all groups that the optimizer is going to have.

    Raises:
        LayoutError: sparse or complex, of different types, or two in the same memory; names the first.
    """
    tensors = [tensor_of(item) for item in items]
    names = [f"parameter number {i}" + (f" ({x[0]})" if isinstance(x, tuple) else "") for i, x in enumerate(items)]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.layout is not torch.strided:
            raise LayoutError(f"{name} is {tensor.layout}; only dense parameters can be sharded")
        if tensor.is_complex():
            raise LayoutError(
                f"{name} is complex, and Horovod moves no complex numbers; hold it as a real parameter "
                "(torch.view_as_real) and view it as complex where the model needs that"
            )
        if tensor.type() != tensors[0].type():
            raise LayoutError(
                f"{name} is a {tensor.type()}, the first one a {tensors[0].type()}; build one optimizer for each type"
            )
    # Of one parameter in two groups torch itself complains.
    different = sorted({id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}.values())
    require_separate([names[i] for i in different], [tensors[i] for i in different])


def checked_class(optimizer_class: Any) -> type[Optimizer]:
    """The class of the local optimizers.

    Raises:
        TypeError: missing, or not a class.
        ConfigError: (a ValueError) a class that is no torch optimizer, such as torch's functional ones, or one that
            cannot be sharded: LBFGS, or one that exchanges gradients or shards by itself.
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
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in optimizer_class.__mro__):
        raise ConfigError(
            "optimizer_class is a ZeroRedundancyOptimizer, and a shard cannot be sharded again; give the class that "
            "updates the parameters, such as torch.optim.Adam"
        )
    if issubclass(optimizer_class, DGCMomentum) or hasattr(optimizer_class, "skip_synchronize"):
        raise ConfigError(
            f"optimizer_class {optimizer_class.__name__} averages gradients itself, and each rank would average those "
            "of other parameters; give a plain class such as torch.optim.SGD and wrap the sharded optimizer in "
            "dgc.torch.DistributedOptimizer, with compression=Compression.dgc() if you like"
        )
    return optimizer_class


def checked_transport(transport: str | Transport, rank: int, size: int) -> str:
    """What all ranks must have in common of the transport: its name.

    Raises:
        ConfigError: no transport, or one among other ranks than this optimizer's.
    """
    if isinstance(transport, str) and transport in CHOICES:
        return transport
    if isinstance(transport, str) or not isinstance(transport, Transport):
        raise ConfigError(f"transport must be one of {', '.join(CHOICES)} or a Transport, got {transport!r}")
    if (transport.rank, transport.size) != (rank, size):
        raise ConfigError(
            f"transport connects rank {transport.rank} of {transport.size}, but this is rank {rank} of {size} in the "
            "optimizer's process set; give a transport among its ranks"
        )
    return f"{type(transport).__name__} {transport.name}"


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
    _require_order(members)
    if not isinstance(members, Iterable) or isinstance(members, (str, bytes, dict)):
        raise TypeError(f"params is a {type(members).__name__}; give an iterable of tensors")
    members = list(members)
    for member in members:
        if isinstance(member, tuple) and len(member) != 2:
            raise TypeError(
                f"params contains a tuple of {len(member)}; give tensors or (name, tensor) pairs: the optimizer can "
                "only optimize tensors"
            )
        if not isinstance(tensor_of(member), torch.Tensor):
            raise TypeError(f"params contains a {type(member).__name__}; the optimizer can only optimize tensors")
    places: dict[int, int] = {}
    for i, member in enumerate(members):
        first = places.setdefault(id(tensor_of(member)), i)
        if first != i:
            raise LayoutError(
                f"a parameter is listed twice in one group, at {first} and {i}; list each one once, as "
                "model.parameters() does also with tied weights"
            )
    return members


def _require_order(collection: Any) -> None:
    if isinstance(collection, (set, frozenset)):
        raise TypeError("params is a set, whose order differs between ranks; give a list")
