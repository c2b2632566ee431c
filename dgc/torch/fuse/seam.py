"""What a distributed optimizer does around its local update, so that the update alone can be fused.

A plain torch optimizer does nothing around it. Horovod's ``DistributedOptimizer`` waits for the averaged gradients
first. An optimizer of any other make (one that shards its state, say) describes itself with a method
``_fuse_seam(self) -> StepSeam``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from dgc.errors import ConfigError


@dataclass(frozen=True)
class StepSeam:
    """One optimizer step, taken apart.

    Attributes:
        local: the optimizer that owns the parameter groups and the state to update.
        update_class: the class whose ``step`` is the local update and nothing else.
        before: brings gradients and options up to date; runs after the closure and before the update.
        after: publishes the updated weights.
        failed: called with an error of the closure, of ``before`` or of the update before it is raised, for other
            ranks that wait for ``after``.
    """

    local: Optimizer
    update_class: type[Optimizer]
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    failed: Callable[[Exception], None] | None = None

    @property
    def communicates(self) -> bool:
        """Whether anything besides the local update happens in a step."""
        return self.before is not None or self.after is not None or self.failed is not None


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

    def before() -> None:
        _synchronize(optimizer)
        if inner.before is not None:
            inner.before()

    return replace(inner, before=before)


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
