"""Who steps an engine's parameters, and what is done before that."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.errors import LayoutError
from dgc.torch.engine.adoption import Adoption
from dgc.torch.engine.step.last_step import LastStep
from dgc.torch.engine.step.saved_state import SavedState, broadcasting
from dgc.torch.engine.step.scaler import warn_of_unknown_scaler
from dgc.torch.engine.step.untraced import untraced

_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_hook: list[Any] = []


class StepWatch:
    """Stands before every step of the optimizer that owns some parameters, until :meth:`end` or collected.

    Attributes:
        owned_by: whether an optimizer is the owner, while that is not known yet.
        last: is told of every step of the parameters, and of every ``zero_grad()`` of their owner.
        saved: what was loaded into the owner since its last step.
        scale_is_known: whether the compressor knows the scale of a GradScaler, or the user was told that it does not.
        on_step: called with the owner before its ``step()``, and again before that of the class that was wrapped, by
            when the exchange is over; if set.
        on_stepped: called when an optimizer has stepped the parameters, as the last thing, if set; it may raise.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], adoption: Adoption, has_failed: Callable[[], bool], last: LastStep
    ) -> None:
        """Watch from now on.

        Two hooks of torch serve all watches and stay for good: removing hooks when a watch is collected could fall
        into the very loop in which torch calls them.

        Args:
            parameters: that are compressed.
            adoption: applies options in the optimizer's place, which are hidden from it during its steps.
            has_failed: whether an error is on its way to the user already.
            last: what becomes of the latest step.
        """
        self.owned_by: Callable[[torch.optim.Optimizer], bool] | None = None
        self._owner: weakref.ref[torch.optim.Optimizer] | None = None
        self._ids = {id(p) for p in parameters}
        self._adoption = adoption
        self._has_failed = has_failed
        self.last = last
        self.saved = SavedState(adoption)
        self.scale_is_known = False
        self.on_step: Callable[[torch.optim.Optimizer], None] | None = None
        self.on_stepped: Callable[[], None] | None = None
        if not _hook:
            _hook.append(register_optimizer_step_pre_hook(_before_any_step))
            _hook.append(register_optimizer_step_post_hook(_after_any_step))
        _watches.add(self)

    def end(self) -> None:
        """Watch no longer."""
        _watches.discard(self)

    @property
    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps the parameters, once it is known and as long as it lives."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and optimizer is not self.owner:
            self.saved.follow(optimizer)
        self._owner = None if optimizer is None else weakref.ref(optimizer)
        if optimizer is not None:
            _tell_of_clearing(optimizer, self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer steps our parameters: what the compressor applies is hidden from it.

        Raises:
            LayoutError: it has a gradient that nobody averaged.
        """
        if getattr(optimizer, "_is_shard", False):
            return  # the sharded optimizer that it belongs to has been here, and its options are the same
        if not self._concerns(optimizer):
            return
        if not self._owns(optimizer):
            if not broadcasting():
                self.last.applied()
            return
        if broadcasting():
            # hvd.broadcast_optimizer_state steps with zero gradients to create the state that it is going to overwrite
            # with the root's. It needs the momentum, which makes the buffers, but no weight decay: that would move the
            # parameters of the ranks that loaded no checkpoint.
            self._adoption.hide(optimizer, ("weight_decay",))
            return
        if not self._has_failed():
            self._refuse_strangers(optimizer)
        if not self.scale_is_known and hasattr(optimizer, "skip_synchronize"):
            self.scale_is_known = warn_of_unknown_scaler()
        self._adoption.hide(optimizer)
        self.last.applied()
        if self.on_step is not None:
            self.on_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step: its groups hold the user's options again, and its closure's exchange counts."""
        if self._owns(optimizer):
            self._adoption.show()
            self.last.stepped()
        if self.last.is_open and self._concerns(optimizer) and not broadcasting():
            self.last.applied()

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        """After all that: the step is whole, and an exception would leave nothing half done."""
        if self.on_stepped is not None and self._concerns(optimizer) and not broadcasting():
            self.on_stepped()

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        owner = self.owner
        if owner is not None:
            return optimizer is owner
        return self.owned_by is not None and self.owned_by(optimizer)

    def _refuse_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        """Horovod averages no gradient of a parameter that was frozen or missing when the optimizer was wrapped."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._ids and p.requires_grad and p.grad is not None:
                    raise LayoutError(
                        f"a parameter of shape {tuple(p.shape)} was not there, or needed no gradient, when the "
                        "compressor was built but has one now; nobody averages it: wrap the optimizer anew after "
                        "adding or unfreezing parameters"
                    )


def learning_rates_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Those of an optimizer's groups, where they are at hand; one that lies on a GPU is not waited for."""
    rates = [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]
    at_hand = [r for r in rates if isinstance(r, (int, float)) or (torch.is_tensor(r) and r.device.type == "cpu")]
    return tuple(float(rate) for rate in at_hand)


@untraced
def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_watches):
        watch.before_step(optimizer)


@untraced
def _after_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_watches):
        watch.after_step(optimizer)
    for watch in list(_watches):
        watch.tell(optimizer)


def _tell_of_clearing(optimizer: torch.optim.Optimizer, watch: StepWatch) -> None:
    """Give this optimizer a ``zero_grad`` that tells the watch when it has run; it keeps neither of them alive."""
    cleared, told = weakref.ref(optimizer), weakref.ref(watch)
    before = optimizer.__dict__.get("zero_grad")

    @untraced
    @functools.wraps(type(optimizer).zero_grad)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        itself, watching = cleared(), told()
        if before is not None:
            before(*args, **kwargs)
        elif itself is not None:
            type(itself).zero_grad(itself, *args, **kwargs)
        if watching is not None and watching.owner is itself:
            watching.last.cleared()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
