"""A sharded optimizer inside Horovod's ``DistributedOptimizer``.

Horovod derives a class from the given optimizer's and calls its constructor with ``param_groups`` and nothing else; its
hooks, handles and process set are attributes of the new object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch.optim import Optimizer

from dgc.errors import ConfigError
from dgc.torch.zero.groups import Group


class OwnedGroups(list[Group]):
    """``param_groups`` with a reference to their optimizer, of which another one is built by them alone."""

    owner: weakref.ref[Any]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[list[Group]], tuple[list[Group]]]:
        """Copy as a plain list, which belongs to no optimizer."""
        return list, (list(self),)


def require_same_set(optimizer: Optimizer, members: Any) -> None:
    """Refuse to shard over other ranks than those that average.

    Raises:
        ConfigError: names both process sets.
    """
    averaged_over = getattr(optimizer, "process_set", None)
    if averaged_over is not None and averaged_over.process_set_id != members.process_set_id:
        raise ConfigError(
            f"gradients are averaged over {averaged_over}, but the optimizer is sharded over {members}; give both the "
            "same process set"
        )


def require_hooks(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Refuse parameters whose gradients are not averaged.

    Raises:
        ConfigError: a DistributedOptimizer, dgc's or Horovod's, was wrapped around and has no hook for one of them.
    """
    engine = getattr(getattr(optimizer, "compression", None), "engine", None)
    hooked = getattr(optimizer, "_requires_update", ())
    unknown = engine is not None and any(engine.adoption.index_of(p) is None for p in parameters)
    if unknown or (hooked and any(p not in hooked for p in parameters)):
        raise ConfigError(
            "DistributedOptimizer averages the gradients of the parameters that the optimizer had when it was wrapped, "
            "and not those of a new group; call add_param_group before wrapping (parameters that are to be trained "
            "later must require gradients then)"
        )


def averaging(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, followed by the averaging of its gradients if Horovod's hooks have begun it."""
    if not hasattr(optimizer, "_handles"):
        return closure

    def closure_then_average() -> Any:
        loss = closure()
        if optimizer._handles:
            optimizer.synchronize()
            optimizer._synchronized = False
        return loss

    return closure_then_average
