"""Running one fused step, and what a fused optimizer remembers between steps."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from dgc.torch.fuse.elementwise import is_elementwise, is_trusted, option_pattern
from dgc.torch.fuse.plan import GroupPlan
from dgc.torch.fuse.seam import StepSeam


@dataclass(frozen=True)
class FuseOptions:
    """The arguments of ``fuse_optimizer``; all that a copy of a fused optimizer keeps."""

    do_flatten: bool = True
    check_flatten: bool = True


class FuseRecord:
    """Plans of one fused optimizer, one per parameter group that can be fused.

    Attributes:
        options: as given to ``fuse_optimizer``.
        fused_sets: number of fused parameters the last ``fuse_step`` made.
        fused_params: number of the user's parameters in them.
    """

    def __init__(self, options: FuseOptions) -> None:
        """Start without plans: they are made at the first ``place`` or ``update``."""
        self.options = options
        self.fused_sets = 0
        self.fused_params = 0
        self._plans: list[GroupPlan | None] = []
        self._verdicts: list[dict[Hashable, bool]] = []
        self._warned = False

    def place(self, seam: StepSeam) -> None:
        """Flatten the weights of all groups that exist now."""
        self._decide(seam)
        for plan, group in zip(self._plans, seam.local.param_groups, strict=True):
            if plan is not None:
                plan.place(group, seam.local)

    def can_fuse(self, seam: StepSeam) -> bool:
        """Whether any group may be fused; if not, the optimizer's own ``step`` does all the work."""
        self._decide(seam)
        return any(plan is not None for plan in self._plans)

    def _decide(self, seam: StepSeam) -> None:
        """Give every group that may be fused a plan, and take it from one whose options no longer allow it."""
        groups = seam.local.param_groups
        del self._plans[len(groups) :], self._verdicts[len(groups) :]
        trusted = is_trusted(seam.update_class)
        for i in range(len(groups)):
            if i == len(self._plans):
                self._plans.append(None)
                self._verdicts.append({})
            if not trusted and not self._may_fuse(seam, i):
                self._plans[i] = None
            elif self._plans[i] is None:
                self._plans[i] = GroupPlan(
                    do_flatten=self.options.do_flatten, check_flatten=self.options.check_flatten, trusted=trusted
                )

    def _may_fuse(self, seam: StepSeam, i: int) -> bool:
        group, verdicts = seam.local.param_groups[i], self._verdicts[i]
        if not group["params"]:  # a shard may be empty
            return True
        pattern = option_pattern(group)
        if pattern not in verdicts:
            verdicts[pattern] = is_elementwise(seam.update_class, group, seam.local.defaults)
        if not verdicts[pattern] and not self._warned:
            self._warned = True
            warnings.warn(
                f"{seam.update_class.__name__} does not treat every element of a parameter by itself, or could not be "
                "shown to: fuse_step() updates its parameters one by one, as step() does.",
                UserWarning,
                stacklevel=2,
            )
        return verdicts[pattern]

    def update(self, seam: StepSeam) -> Any:
        """The local update with fused parameters in the place of their members.

        Returns:
            What the plain step returned.
        """
        local = seam.local
        self._decide(seam)
        for plan, group in zip(self._plans, local.param_groups, strict=True):
            if plan is not None:
                plan.prepare(group, local)
        sets = [fused for plan in self._plans if plan is not None for fused in plan.sets]
        self.fused_sets = len(sets)
        self.fused_params = sum(len(fused.members) for fused in sets)
        new_state = {id(p) for p in local.state} if any(not fused.state for fused in sets) else None
        result = self._step_fused(local, seam.plain_step)
        if new_state is not None:
            _in_group_order(local, new_state)
        return result

    def _step_fused(self, local: Any, plain_step: Callable[..., Any]) -> Any:
        """Run the plain step while the optimizer sees the fused parameters, and restore its groups."""
        groups, state = local.param_groups, local.state
        hooks = local._optimizer_step_pre_hooks, local._optimizer_step_post_hooks
        sets = [fused for plan in self._plans if plan is not None for fused in plan.sets]
        shown = []
        for plan, group in zip(self._plans, groups, strict=True):
            seen = dict(group)
            if plan is not None and plan.sets:
                seen["params"] = [*(fused.weight for fused in plan.sets), *plan.rest]
                seen.pop("param_names", None)  # there is no name for a fused parameter
            shown.append(seen)
        for fused in sets:
            state[fused.weight] = fused.state
        local.param_groups = shown
        # A class that calls super().step() would run the hooks again, on parameters the user does not know.
        local._optimizer_step_pre_hooks, local._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            return plain_step(local)
        finally:
            # After an error too: what the step had done by then is done, as it is when a plain step fails.
            local.param_groups = groups
            local._optimizer_step_pre_hooks, local._optimizer_step_post_hooks = hooks
            for fused in sets:
                fused.state = state.pop(fused.weight, {})
            for plan in self._plans:
                if plan is not None:
                    plan.absorb(state)
            for group, seen in zip(groups, shown, strict=True):
                # Some optimizers keep counters among the options.
                group.update((key, value) for key, value in seen.items() if key != "params")


def _in_group_order(optimizer: Optimizer, known: set[int]) -> None:
    """Order the state entries made in this step as a plain step would have made them: by parameter.

    Fused sets follow memory order; ``state_dict()`` lists entries in the order they were made.
    """
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        if param in optimizer.state and id(param) not in known:
            optimizer.state[param] = optimizer.state.pop(param)
