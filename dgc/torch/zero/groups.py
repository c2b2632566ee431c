"""Parameter groups of a sharded optimizer: the full ones outside, each rank's share of them inside.

And what it may be built from: what is refused is refused before any rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dgc.core.transport import Collectives
from dgc.errors import ConfigError, LayoutError
from dgc.torch.momentum.optimizer import DGCMomentum
from dgc.torch.zero.memory import require_separate
from dgc.transport.choice import CHOICES

_NO_OPTIONS = ("params", "param_names")

Group = dict[str, Any]


def options_of(group: Mapping[str, Any]) -> Group:
    """A group without its parameters."""
    return {k: v for k, v in group.items() if k not in _NO_OPTIONS}


def copy_options(source: Iterable[Mapping[str, Any]], target: Iterable[Group]) -> None:
    """Set every group's options to those of its counterpart."""
    for given, taken in zip(source, target, strict=True):
        taken.update(options_of(given))


def local_group(group: Mapping[str, Any], owners: Sequence[int], rank: int) -> Group:
    """A rank's share of a group; it may be empty, so that every rank has every group."""
    owned = [p for p, owner in zip(group["params"], owners, strict=True) if owner == rank]
    return {**options_of(group), "params": owned}


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All parameters in registration order."""
    return [p for group in groups for p in group["params"]]


def names_of(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every parameter's place, followed by its own name if it has one; no two are alike."""
    names = []
    for g, group in enumerate(groups):
        own = group.get("param_names", ())
        for i in range(len(group["params"])):
            names.append(f"group {g} parameter {i}" + (f" ({own[i]})" if i < len(own) else ""))
    return names


def kind_of(parameter: torch.Tensor) -> str:
    """What all ranks must have in common of a parameter: shape, type, and whether it is trainable."""
    trainable = "trainable" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trainable}"


def described_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks must have in common of the groups' options, by name."""
    return {
        f"group {g} option {key}": _plain(value)
        for g, group in enumerate(groups)
        for key, value in options_of(group).items()
    }


def description(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must have in common, by name: the parameters, and the options of the optimizer and its groups."""
    return {
        **{name: kind_of(p) for name, p in zip(names_of(groups), parameters_of(groups), strict=True)},
        **{f"option {key}": _plain(value) for key, value in defaults.items()},
        **described_options(groups),
    }


def _plain(value: object) -> object:
    """A value that JSON knows and that is the same on two ranks if the option is; of objects only their type is."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"


def checked_groups(params: object) -> list[Group]:
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
    items = _listed(params, "tensors or of group dicts")
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


def tensor_of(item: torch.Tensor | tuple[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of a group's member, which may be a (name, tensor) pair."""
    return item[1] if isinstance(item, tuple) else item


def require_shardable(items: Sequence[Any]) -> None:
    """Refuse tensors or (name, tensor) pairs, of all groups together, that ranks cannot own one by one.

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


def checked_class(optimizer_class: object) -> type[Optimizer]:
    """The class of the local optimizers.

    Raises:
        TypeError: missing, or not a class.
        ConfigError: (a ValueError) a class that is no torch optimizer, such as torch's functional ones, or one that
            cannot be sharded: LBFGS and others that look at all parameters together, or one that exchanges gradients
            or shards by itself.
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


def require_no_common_norm(optimizer: Optimizer) -> None:
    """Refuse a local optimizer that limits the norm of all gradients together, as several LAMBs do by default.

    Raises:
        ConfigError: names the option.
    """
    # A class that knows the option has it among its defaults. One LAMB has it always, and uses it with pre_norm=True.
    if "max_grad_norm" not in optimizer.defaults or not getattr(optimizer, "pre_norm", True):
        return
    for group in optimizer.param_groups:
        if group["max_grad_norm"]:
            raise ConfigError(
                f"{type(optimizer).__name__} has max_grad_norm={group['max_grad_norm']}: it would limit the norm of "
                "each rank's share of the gradients instead of that of all; switch it off (max_grad_norm=0, or None) "
                "and call torch.nn.utils.clip_grad_norm_ on the averaged gradients before step()"
            )


def checked_transport(transport: str | Collectives, rank: int, size: int) -> str:
    """What all ranks must have in common of the transport: its name.

    Raises:
        ConfigError: no transport, or one among other ranks than this optimizer's.
    """
    if isinstance(transport, str) and transport in CHOICES:
        return transport
    if isinstance(transport, str) or not isinstance(transport, Collectives):
        raise ConfigError(f"transport must be one of {', '.join(CHOICES)} or a Transport, got {transport!r}")
    if (transport.rank, transport.size) != (rank, size):
        raise ConfigError(
            f"transport connects rank {transport.rank} of {transport.size}, but this is rank {rank} of {size} in the "
            "optimizer's process set; give a transport among its ranks"
        )
    return f"{type(transport).__name__} {transport.name}"


def chosen_set(group: object, process_group: object, process_set: object) -> Any:
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
    members = _listed(members, "tensors")
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


def _listed(params: object, of: str) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError("params is a set, whose order differs between ranks; give a list")
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes, dict)):
        raise TypeError(f"params is a {type(params).__name__}; give an iterable of {of}")
    return list(params)
