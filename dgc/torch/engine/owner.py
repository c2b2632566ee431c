"""What Horovod's interface leaves out and Python's frames show. No other module of this adapter looks into frames.

``hvd.DistributedOptimizer`` derives a class from the given optimizer's, builds a new optimizer from its
``param_groups``, and gives a compressor no reference to it. ``hvd.broadcast_optimizer_state`` steps the optimizer with
zero gradients, on those ranks alone that have no state yet. ``GradScaler.step`` leaves no trace on an optimizer.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, GeneratorType
from typing import Any

import torch

from dgc.errors import ConfigError

_NEAR = 8
"""Frames between Horovod's optimizer and a compressor or a list of groups, at most."""

_FAR = 12
"""Frames between ``broadcast_optimizer_state`` or ``GradScaler.step`` and a step hook, at most."""

Owned = Callable[[torch.optim.Optimizer], None]


class _Announcing(list[dict[str, Any]]):
    """``param_groups`` that report the Horovod optimizer which is being built from them."""

    base: weakref.ref[torch.optim.Optimizer]
    report: weakref.WeakMethod[Owned]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Torch's constructor makes a list of its own of the groups."""
        base, report = self.base(), self.report()
        if base is not None and report is not None:
            built = _optimizer_among(_frames(_NEAR), lambda found: _is_being_built(found, base))
            if built is not None:
                base.param_groups = list(list.__iter__(self))
                _refuse_used_names()
                report(built)
        return list.__iter__(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        """A copy is a plain list: it belongs to no optimizer."""
        return list, (list(self),)


def announce_owner(base: torch.optim.Optimizer, report: Owned) -> None:
    """Report the optimizer that Horovod is going to build from ``base``, as soon as it exists.

    Groups of another type are left alone; their optimizer is found when it hands over the first gradient.

    Args:
        base: the user's optimizer.
        report: a bound method, called with Horovod's; its object is not kept alive.
    """
    if type(base.param_groups) is not list:
        return
    groups = _Announcing(base.param_groups)
    groups.base, groups.report = weakref.ref(base), weakref.WeakMethod(report)
    base.param_groups = groups


def find_owner(compressor: object) -> torch.optim.Optimizer:
    """The Horovod optimizer that is calling ``compress()``.

    Raises:
        ConfigError: something else called.
    """
    owner = _optimizer_among(_frames(_NEAR), lambda found: getattr(found, "_compression", None) is compressor)
    if owner is None:
        raise ConfigError("compress() was called by something else than a Horovod DistributedOptimizer for PyTorch")
    return owner


def broadcasting() -> bool:
    """Whether ``hvd.broadcast_optimizer_state`` is among the callers."""
    for frame in _frames(_FAR):
        if frame.f_code.co_name == "broadcast_optimizer_state":
            return True
    return False


def stepping_scaler(kind: type) -> Any:
    """The ``GradScaler`` of class ``kind`` that steps an optimizer now; None if none does."""
    for frame in _frames(_FAR):
        if frame.f_code.co_name in ("step", "_maybe_opt_step") and isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"]
    return None


def _frames(limit: int) -> list[FrameType]:
    """Frames of the callers, from the caller's caller outwards, at most ``limit`` of them."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < limit:
        found.append(frame)
        frame = frame.f_back
    return found


def _refuse_used_names() -> None:
    """Say what Horovod is going to call parameters without a name.

    Raises:
        ConfigError: its names are a generator that has been used up, by the compressor mostly.
    """
    for frame in _frames(_NEAR):
        horovods = str(frame.f_globals.get("__name__")).startswith("horovod.")
        named = frame.f_locals.get("named_parameters") if horovods else None
        if isinstance(named, GeneratorType) and inspect.getgeneratorstate(named) == inspect.GEN_CLOSED:
            raise ConfigError(
                "named_parameters is a generator, which can be used once only, and the compressor has used it: call "
                "model.named_parameters() again"
            )


def _is_being_built(found: torch.optim.Optimizer, base: torch.optim.Optimizer) -> bool:
    return (
        found is not base
        and isinstance(found, type(base))
        and hasattr(type(found), "skip_synchronize")
        and not hasattr(found, "_compression")
        and hasattr(found, "_optimizer_state_dict_pre_hooks")
    )


def _optimizer_among(
    callers: list[FrameType], wanted: Callable[[torch.optim.Optimizer], bool]
) -> torch.optim.Optimizer | None:
    for frame in callers:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.optim.Optimizer) and wanted(candidate):
            return candidate
    return None
