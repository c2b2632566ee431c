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
    """Every parameter's own name, or its place."""
    return [
        name
        for g, group in enumerate(groups)
        for name in group.get("param_names", [f"group {g} parameter {i}" for i in range(len(group["params"]))])
    ]


def description(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must have in common, by name: the options that are plain values, and the parameters."""
    plain = {k: v for k, v in defaults.items() if isinstance(v, (bool, int, float, str, tuple, type(None)))}
    return {
        **plain,
        **{
            name: f"{tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
            for name, p in zip(names_of(groups), parameters_of(groups), strict=True)
        },
    }
