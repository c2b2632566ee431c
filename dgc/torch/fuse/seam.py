"""What a distributed optimizer does around its local update, so that the update alone can be fused.

A plain torch optimizer does nothing around it. Horovod's ``DistributedOptimizer`` waits for the averaged gradients
first. An optimizer of any other make (one that shards its state, say) describes itself with a method
``_fuse_seam(self) -> StepSeam``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from dgc.errors import ConfigError


@dataclass(frozen=True)
class StepSeam:
    """One optimizer step, taken apart.

    Attributes:
        local: the optimizer that owns the parameter groups and the state to update.
        update_class: the class whose ``step`` is the local update and nothing else.
        around: the context of the update; None where nothing else happens in a step. It gets a function that computes
            the gradients, which it calls first; at the end it publishes the updated weights. An error of that function
            or of the update is raised in it, so that it can be reported to other ranks.
    """

    local: Optimizer
    update_class: type[Optimizer]
    around: Callable[[Callable[[], None]], AbstractContextManager[None]] | None = None


def step_without_hooks(update_class: type[Optimizer]) -> Callable[..., Any]:
    """The ``step`` of ``update_class`` as it was written: torch wraps it to run step hooks around it."""
    step = update_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def resolve(optimizer: Optimizer) -> StepSeam:
    """Take the step of ``optimizer`` apart.

    Raises:
        ConfigError: Horovod's optimizer with ``op=Adasum``, which updates the parameters during the backward pass.
    """
    bases = type(optimizer).__mro__
    wrapping = [i for i, cls in enumerate(bases) if "skip_synchronize" in vars(cls)]
    if not wrapping or any("_fuse_seam" in vars(cls) for cls in bases[: wrapping[-1] + 1]):
        return _describe(optimizer, bases[0])
    if hasattr(optimizer, "_starting_models"):
        raise ConfigError(
            "op=Adasum updates every parameter by itself inside the backward pass, so there is no step to fuse. "
            "Use op=Average, or call step()."
        )
    # Horovod derives a class from the user's at run time, so the user's comes right behind the last such class.
    inner = _describe(optimizer, bases[wrapping[-1] + 1])

    def around(compute: Callable[[], None]) -> AbstractContextManager[None]:
        def averaged() -> None:
            compute()
            _synchronize(optimizer)

        if inner.around is not None:
            return inner.around(averaged)
        averaged()
        return nullcontext()

    return StepSeam(inner.local, inner.update_class, around)


def _describe(optimizer: Optimizer, cls: type) -> StepSeam:
    describe = getattr(cls, "_fuse_seam", None)
    return describe(optimizer) if describe is not None else StepSeam(optimizer, cls)


def _synchronize(optimizer: Any) -> None:
    """What Horovod's ``step`` does ahead of the local update.

    Source: horovod 0.28.1, ``horovod/torch/optimizer.py``, ``_DistributedOptimizer.step``.
    """
    if optimizer._should_synchronize:
        if optimizer._synchronized:
            warnings.warn(
                "fuse_step() called after optimizer.synchronize() but outside optimizer.skip_synchronize(): "
                "gradients are exchanged a second time.",
                UserWarning,
                stacklevel=4,
            )
        optimizer.synchronize()
    optimizer._synchronized = False
