"""Running one fused step, and what a fused optimizer remembers between steps."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dgc.torch.fuse.elementwise import is_elementwise, is_never_elementwise
from dgc.torch.fuse.plan import GroupPlan
from dgc.torch.fuse.seam import StepSeam, step_without_hooks


@dataclass(frozen=True)
class FuseOptions:
    """The arguments of ``fuse_optimizer``; all that a copy of a fused optimizer keeps."""

    do_flatten: bool = True
    check_flatten: bool = True
    elementwise: bool | None = None


class FuseRecord:
    """The plans of one fused optimizer, one per parameter group.

    Attributes:
        options: as given to ``fuse_optimizer``.
        fused_sets: number of fused parameters the last ``fuse_step`` made.
        fused_params: number of the user's parameters in them.
    """

    def __init__(self, options: FuseOptions) -> None:
        """Start without plans: they are made at the first ``flatten`` or ``update``."""
        self.options = options
        self.fused_sets = 0
        self.fused_params = 0
        self._plans: list[GroupPlan] = []
        self._warned = False

    def can_fuse(self, seam: StepSeam) -> bool:
        """Whether the optimizer is element-wise; if not, its own ``step`` does all the work, after one warning.

        Raises:
            ConfigError: declared element-wise, but known not to be.
        """
        update_class = seam.update_class
        if is_elementwise(update_class, self.options.elementwise):
            return True
        if self.options.elementwise is None and not self._warned:
            self._warned = True
            if is_never_elementwise(update_class):
                reason, advice = "does not update every element of a parameter by itself", "."
            else:
                reason = "is not known to update every element of a parameter by itself"
                advice = (
                    ". If it does, say so to have it fused: fuse_optimizer(optimizer, elementwise=True); "
                    "elementwise=False turns this warning off."
                )
            warnings.warn(
                f"{update_class.__name__} {reason}: fuse_step() does what step() does{advice}",
                UserWarning,
                stacklevel=3,
            )
        return False

    def flatten(self, seam: StepSeam) -> None:
        """Flatten the weights of all groups that exist now."""
        for plan, group in self._plans_of(seam.local):
            plan.flatten(group, seam.local)

    def update(self, seam: StepSeam, closure: Callable[[], Any] | None = None) -> Any:
        """Run the local update with fused parameters in the place of their members; return what ``step`` does.

        The closure returns the loss of gradients that are there already.
        """
        local = seam.local
        planned = self._plans_of(local)
        for plan, group in planned:
            plan.prepare(group, local)
        sets = [fused for plan, _ in planned for fused in plan.sets]
        self.fused_sets = len(sets)
        self.fused_params = sum(len(fused.members) for fused in sets)
        known = {id(p) for p in local.state} if any(not fused.state for fused in sets) else None
        result = self._step_fused(local, step_without_hooks(seam.update_class), closure)
        if known is not None:
            _in_group_order(local, known)
        return result

    def _plans_of(self, local: Optimizer) -> list[tuple[GroupPlan, dict[str, Any]]]:
        """Every group of ``local`` with its plan; groups may come and go at the end."""
        groups, options = local.param_groups, self.options
        del self._plans[len(groups) :]
        while len(self._plans) < len(groups):
            self._plans.append(GroupPlan(do_flatten=options.do_flatten, check_flatten=options.check_flatten))
        return list(zip(self._plans, groups, strict=True))

    def _step_fused(self, local: Any, plain_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Run the plain step while the optimizer sees the fused parameters, and restore its groups."""
        groups, state = local.param_groups, local.state
        hooks = local._optimizer_step_pre_hooks, local._optimizer_step_post_hooks
        sets = [fused for plan in self._plans for fused in plan.sets]
        shown = []
        for plan, group in zip(self._plans, groups, strict=True):
            seen = dict(group)
            if plan.sets:
                seen["params"] = [*(fused.weight for fused in plan.sets), *plan.unfused]
                seen.pop("param_names", None)  # there is no name for a fused parameter
            shown.append(seen)
        for fused in sets:
            state[fused.weight] = fused.state
        arguments = () if closure is None else (_EvaluatedClosure(closure, local, shown),)
        local.param_groups = shown
        # A class that calls super().step() would run the hooks again, on parameters the user does not know.
        local._optimizer_step_pre_hooks, local._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            return plain_step(local, *arguments)
        finally:
            # After an error too: what the step had done by then is done, as it is when a plain step fails.
            local.param_groups = groups
            local._optimizer_step_pre_hooks, local._optimizer_step_post_hooks = hooks
            for fused in sets:
                fused.state = state.pop(fused.weight, {})
            for plan in self._plans:
                plan.write_back(state)
            for group, seen in zip(groups, shown, strict=True):
                # Some optimizers keep counters among the options.
                group.update((key, value) for key, value in seen.items() if key != "params")


class _EvaluatedClosure:
    """What the optimizer gets in the place of the user's closure: it returns the loss, and evaluates nothing.

    Gradients are gathered before the step, so the closure has run by then. That is the same as long as the optimizer
    calls its closure once, before it writes to a parameter; whatever else it does would silently give other results.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self._closure = closure
        self._name = type(optimizer).__name__
        self._weights: list[Tensor] = [p for group in groups for p in group["params"]]
        self._versions = [p._version for p in self._weights]
        self._called = False

    def __call__(self) -> Any:
        if self._called or [p._version for p in self._weights] != self._versions:
            raise RuntimeError(
                f"{self._name} calls its closure more than once, or after it changed parameters. A fused step runs "
                "the closure once, before the update: call step(closure) instead of fuse_step(closure)."
            )
        self._called = True
        return self._closure()


def _in_group_order(optimizer: Optimizer, known: set[int]) -> None:
    """Order the state entries made in this step as a plain step would have made them: by parameter.

    Fused sets follow memory order; ``state_dict()`` lists entries in the order they were made. ``known`` are the ids of
    the parameters that had state before.
    """
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        if param in optimizer.state and id(param) not in known:
            optimizer.state[param] = optimizer.state.pop(param)
