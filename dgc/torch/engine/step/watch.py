"""What happens around an optimizer's ``step()``: who steps the parameters, and what is done before and after that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.core.exchange.records import StepContext
from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError
from dgc.torch.engine.adoption import Adoption
from dgc.torch.engine.horovod.owner import broadcasting
from dgc.torch.engine.step.replicas import share_options
from dgc.torch.engine.step.results import Results
from dgc.torch.engine.step.saved_state import SavedState
from dgc.torch.engine.step.scaler import warn_of_unknown_scaler
from dgc.torch.engine.step.sparse_updates import SparseUpdates
from dgc.torch.engine.step.untraced import untraced
from dgc.torch.engine.tensors import local

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call of ``step()``, the optimizer itself first."""

_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_hook: list[Any] = []


class Driver(Protocol):
    """Hands gradients of one optimizer to the engine: dgc's own (``optimizer.py``), Horovod's (``stock.py``), DDP's."""

    @property
    def begun(self) -> bool:
        """Whether a backward pass has run for a step that is not exchanged yet."""
        ...

    @property
    def averaged(self) -> bool:
        """Whether ``synchronize()`` has run, and no backward pass after it."""
        ...

    @property
    def first_pass(self) -> bool:
        """Whether each gradient is handed over in the backward pass that computes it."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether ``step()`` exchanges now, so that no code of the script sees gradients before the update."""
        ...

    def before_update(self, closure: bool) -> None:
        """``step()`` begins, with a closure or without; the optimizer's own update follows."""
        ...

    def closure_returned(self) -> None:
        """The closure of a step has computed gradients."""
        ...

    def updated(self) -> None:
        """The optimizer has updated the parameters."""
        ...

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: a state was loaded into the optimizer."""
        ...

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""
        ...


class StepWatch:
    """Follows the steps of the optimizer that owns some parameters, until :meth:`end` or collected.

    Attributes:
        results: of the latest step.
        updates: whether they are applied as entries.
        saved: what was loaded into the owner since its last step.
        in_closure: whether the closure of a step runs now.
        plain_step: whether ``step()`` was called without a closure, and has exchanged nothing yet.
        scale_is_known: whether the compressor knows the scale of a GradScaler, or a warning said that it does not.
        owned_by: whether an optimizer is the owner, while that is not known yet.
        alone: whether no other optimizer may have momentum or decay for these parameters, or be distributed over them.
        on_stepped: called when an optimizer has stepped the parameters, as the last thing, if set; it may raise.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        adoption: Adoption,
        has_failed: Callable[[], bool],
        results: Results,
        updates: SparseUpdates,
    ) -> None:
        """Watch from now on.

        Two hooks of torch serve all watches and stay for good: removing hooks when a watch is collected could fall
        into the very loop in which torch calls them.

        Args:
            parameters: that are compressed.
            adoption: applies options in the optimizer's place, which are hidden from it during its steps.
            has_failed: whether an error is on its way to the user already.
            results: of the latest step.
            updates: applies entries right before the owner's update.
        """
        self.owned_by: Callable[[torch.optim.Optimizer], bool] | None = None
        self.on_stepped: Callable[[], None] | None = None
        self.in_closure = self.plain_step = self.scale_is_known = self._broadcasts = self.alone = False
        self.results, self.updates = results, updates
        self.saved = SavedState(adoption, self._state_loaded)
        self._owner: weakref.ref[torch.optim.Optimizer] | None = None
        self._driver: weakref.ref[Driver] | None = None
        self._ids = {id(p) for p in parameters}
        self._adoption = adoption
        self._has_failed = has_failed
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

    @property
    def driver(self) -> Driver | None:
        """What hands over the owner's gradients, once it is known and as long as the owner lives."""
        return None if self._driver is None or self.owner is None else self._driver()

    @property
    def contested(self) -> bool:
        """Whether another optimizer's gradients of these parameters are being exchanged now."""
        others = [watch for watch in list(_watches) if watch is not self and not watch._ids.isdisjoint(self._ids)]
        return any(watch.driver is not None and watch.driver.begun for watch in others)

    def own(self, optimizer: torch.optim.Optimizer, driver: Driver | None = None) -> None:
        """Take an optimizer for the owner; neither it nor the driver is kept alive."""
        if optimizer is not self.owner:
            self.saved.follow(optimizer)
            self._owner = weakref.ref(optimizer)
        if driver is not None:
            self._driver = weakref.ref(driver)

    def before_step(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> Arguments | None:
        """Before an optimizer steps our parameters: exchange, and hide what the compressor applies.

        Returns:
            The arguments that ``step()`` gets, if other ones.

        Raises:
            LayoutError: it has a gradient that was not exchanged.
        """
        if not self._owns(optimizer):
            if self._concerns(optimizer) and not broadcasting():
                if self.alone:
                    self._adoption.refuse_second(optimizer)
                self.results.applied()
            return None
        self._broadcasts = broadcasting()
        if self._broadcasts:
            # It needs the momentum, which makes the buffers that it is going to overwrite with the root's, but no
            # weight decay: that would move the parameters of the ranks that loaded no checkpoint.
            self._adoption.hide(optimizer, ("weight_decay",))
            return None
        closure = _closure_of(arguments)
        self.plain_step = closure is None
        driver = self.driver
        if driver is not None:
            driver.before_update(closure is not None)
        if not self._has_failed():
            self._refuse_strangers(optimizer)
        if not self.scale_is_known and driver is not None:
            self.scale_is_known = warn_of_unknown_scaler()
        self._adoption.hide(optimizer)
        self.results.applied()
        self.updates.apply(optimizer)
        return None if closure is None else _with_closure(arguments, self._followed(closure))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step: its groups hold the user's options again, and its closure's exchange counts."""
        if self._owns(optimizer):
            self._adoption.show()
            self.results.stepped()
            if (driver := self.driver) is not None:
                driver.updated()
        if self.results.undecided and self._updates(optimizer):
            self.results.applied()

    def share_options(self, transport: Transport, context: StepContext, members: Sequence[int]) -> bool:
        """Let ranks without data follow the owner's options of one that trains. Collective.

        Returns:
            Whether they make the same update: nothing of the script's comes before it.
        """
        assert self.owner is not None, "it has begun the step"
        at_once = self.driver is not None and self.driver.in_step
        return share_options(transport, context, self._adoption, members, self.owner, at_once)

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        """After all that: the step is whole, and an exception would leave nothing half done."""
        if self.on_stepped is not None and self._updates(optimizer):
            self.on_stepped()

    def _state_loaded(self) -> None:
        if (driver := self.driver) is not None:
            driver.begin_anew()

    def _followed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @untraced
        def followed() -> Any:
            self.in_closure = True
            try:
                # The optimizer runs it with its options hidden; a backward pass in it reads them.
                loss = closure()
                if (driver := self.driver) is not None:
                    driver.closure_returned()
                return loss
            finally:
                self.in_closure = False

        return followed

    def _updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step of an optimizer has updated our parameters."""
        if optimizer is self.owner:
            return not self._broadcasts
        return self._concerns(optimizer) and not broadcasting()

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._ids.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"])

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        owner = self.owner
        if owner is not None:
            return optimizer is owner
        return self.owned_by is not None and self.owned_by(optimizer)

    def _refuse_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        """No gradient is averaged of a parameter that was frozen or missing when the optimizer was wrapped."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._ids and p.requires_grad and p.grad is not None:
                    raise LayoutError(
                        f"a parameter of shape {tuple(p.shape)} was not there, or needed no gradient, when the "
                        "compressor was built but has one now, which is not averaged: build a new optimizer and "
                        "wrap it after adding or unfreezing parameters"
                    )


def require_free(parameters: Sequence[torch.Tensor], *, of_all: bool = True) -> None:
    """Refuse parameters whose gradients are exchanged already.

    Args:
        parameters: that are about to be bound.
        of_all: whether dgc's or Horovod's optimizers count, beside DDP's hook.

    Raises:
        ConfigError: they are.
    """
    ids = {id(p) for p in parameters}
    if any(w.driver is not None and (of_all or w.alone) and not ids.isdisjoint(w._ids) for w in list(_watches)):
        raise ConfigError(
            "these parameters' gradients are exchanged already, by DDP's hook or a distributed optimizer: use one of "
            "them, once, or close() the other compressor first"
        )


def learning_rates_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Those of an optimizer's groups, where they are at hand; one that lies on a GPU is not waited for."""
    rates = [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]
    at_hand = [r for r in rates if isinstance(r, (int, float)) or (torch.is_tensor(r) and r.device.type == "cpu")]
    return tuple(float(rate) for rate in at_hand)


def only_makes_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a step without a backward pass is one of ``torch.distributed.checkpoint``, for the optimizer's state.

    All gradients and learning rates are 0 in it. An exchange would send entries that nobody applies.
    """
    return set(learning_rates_of(optimizer)) == {0.0} and all(
        p.grad is not None and not bool(local(p.grad).any()) for p in parameters
    )


def _closure_of(arguments: Arguments) -> Callable[[], Any] | None:
    args, kwargs = arguments
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _with_closure(arguments: Arguments, closure: Callable[[], Any]) -> Arguments:
    args, kwargs = arguments
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


@untraced
def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments, changed = (args, kwargs), False
    for watch in list(_watches):
        if (others := watch.before_step(optimizer, arguments)) is not None:
            arguments, changed = others, True
    return arguments if changed else None


@untraced
def _after_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for watch in list(_watches):
        watch.after_step(optimizer)
    for watch in list(_watches):
        watch.tell(optimizer)
