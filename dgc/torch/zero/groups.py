"""Parameter groups of a sharded optimizer: the full ones outside, each rank's share of them inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from dgc.torch.zero.ranks import Ranks

if TYPE_CHECKING:
    import weakref

_NO_OPTIONS = ("params", "param_names")

Group = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """What is needed to build the same sharded optimizer once more.

    Attributes:
        optimizer_class: of the local optimizers.
        ranks: among which it is sharded.
        bucket_view: whether parameters are kept in flat buffers.
        sparse_parameters: whether to look for updates that change few entries.
        defaults: options of the local optimizers.
        origin: the optimizer that this describes.
    """

    optimizer_class: type[Optimizer]
    ranks: Ranks
    bucket_view: bool
    sparse_parameters: bool
    defaults: dict[str, Any]
    origin: weakref.ref[Any]


class RecipeGroups(list[Group]):
    """``param_groups`` that know how their optimizer was built.

    Horovod's ``DistributedOptimizer`` derives a class from the given optimizer's and calls its constructor with these
    groups and nothing else.
    """

    recipe: Recipe

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain list: it belongs to no optimizer."""
        return list, (list(self),)


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


def _plain(value: Any) -> Any:
    """A value that JSON knows and that is the same on two ranks if the option is; of objects only their type is."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"
