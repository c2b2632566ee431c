"""Which optimizer did Horovod build from the user's?

``hvd.DistributedOptimizer`` derives a class from the given optimizer's, and builds a new optimizer from its
``param_groups``. It tells a compressor nothing about that one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from dgc.errors import ConfigError
from dgc.torch.engine.step.callers import frames

if TYPE_CHECKING:
    from dgc.torch.engine.step.hook import StepWatch

_FRAMES = 8
"""How far away the caller may be who is looked for."""


class _Announcing(list[dict[str, Any]]):
    """``param_groups`` that tell a watch which optimizer is being built from them."""

    base: weakref.ref[torch.optim.Optimizer]
    watch: weakref.ref[StepWatch]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Torch's constructor makes a list of its own of the groups."""
        base, watch = self.base(), self.watch()
        if base is not None and watch is not None:
            built = _optimizer_among(frames(_FRAMES), lambda found: _is_being_built(found, base))
            if built is not None:
                base.param_groups = list(list.__iter__(self))
                watch.owner = built
        return list.__iter__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain list: it belongs to no optimizer."""
        return list, (list(self),)


def announce_owner(base: torch.optim.Optimizer, watch: StepWatch) -> None:
    """Let ``watch`` know the optimizer that Horovod is going to build from ``base``, as soon as it exists.

    Groups of another make are left alone; their optimizer is found when it hands over the first gradient.
    """
    if type(base.param_groups) is not list:
        return
    groups = _Announcing(base.param_groups)
    groups.base, groups.watch = weakref.ref(base), weakref.ref(watch)
    base.param_groups = groups


def find_owner(compressor: Any) -> torch.optim.Optimizer:
    """The Horovod optimizer that is calling ``compress()``: it is a local of one of the callers' frames.

    Raises:
        ConfigError: something else called.
    """
    owner = _optimizer_among(frames(_FRAMES), lambda found: getattr(found, "_compression", None) is compressor)
    if owner is None:
        raise ConfigError("compress() was called by something else than a Horovod DistributedOptimizer for PyTorch")
    return owner


def _is_being_built(found: torch.optim.Optimizer, base: torch.optim.Optimizer) -> bool:
    return (
        found is not base
        and isinstance(found, type(base))
        and hasattr(type(found), "skip_synchronize")
        and not hasattr(found, "_compression")
        and hasattr(found, "_optimizer_state_dict_pre_hooks")
    )


def _optimizer_among(callers: Iterator[FrameType], wanted: Any) -> torch.optim.Optimizer | None:
    for frame in callers:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.optim.Optimizer) and wanted(candidate):
            return candidate
    return None
