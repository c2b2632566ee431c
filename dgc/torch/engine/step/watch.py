"""What happens around an optimizer's ``step()``: who steps the parameters, and what is done before and after that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.engine.adoption import Adoption
from dgc.torch.engine.owner import broadcasting
from dgc.torch.engine.step.results import Results
from dgc.torch.engine.step.saved_state import SavedState
from dgc.torch.engine.step.scaler import steps_by_scaler, warn_of_unknown_scaler
from dgc.torch.engine.step.sparse_updates import SparseUpdates
from dgc.torch.engine.step.untraced import untraced, weakly
from dgc.torch.engine.tensors import local

_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_hook: list[Any] = []


Closure = Callable[[], Any]


class Watched(Protocol):
    """What a watch needs of its engine, whose attributes these are."""

    parameters: list[torch.Tensor]
    adoption: Adoption
    results: Results
    updates: SparseUpdates
    error: DGCError | None
    is_scaled: bool
    left_alone: set[int]

    def follow(self, watch: StepWatch) -> None: ...  # noqa: D102


class StepWatch:
    """Follows the steps of the optimizer that owns an engine's parameters, until :meth:`end` or collected.

    A front end derives one that hands over gradients: dgc's own (``optimizer.py``), Horovod's (``stock.py``), DDP's.

    Attributes:
        saved: what was loaded into the owner since its last step.
        plain_step: whether ``step()`` was called without a closure, and has exchanged nothing yet.
        by_scaler: whether a GradScaler has called that ``step()``.
        drives: whether this object hands over gradients.
        holds: whether gradients are looked at once more before the last bucket is sent.
        begun: whether a backward pass has run for a step that is not exchanged yet.
        averaged: whether gradients were exchanged, and no backward pass has run after that.
        first_pass: whether each gradient is handed over in the backward pass that computes it.
        in_step: whether ``step()`` exchanges now, so that no code of the script sees gradients before the update.
        unhook: ends the calls of :meth:`drive`, where that was called.
        alone: whether no other optimizer may have momentum or decay for these parameters, or be distributed over them.
    """

    plain_step = by_scaler = drives = alone = holds = _broadcasts = False

    def __init__(self, engine: Watched) -> None:
        """Watch from now on.

        Two hooks of torch serve all watches and stay for good: removing hooks when a watch is collected could fall
        into the very loop in which torch calls them.

        Args:
            engine: whose parameters are compressed; it does not know this object yet.
        """
        self.watched = engine
        self.saved = SavedState(engine.adoption, self.begin_anew)
        self._scale_is_known = engine.is_scaled
        self._owner: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._ids = {id(p) for p in engine.parameters}
        if not _hook:
            _hook.append(register_optimizer_step_pre_hook(_before_any_step))
            _hook.append(register_optimizer_step_post_hook(_after_any_step))
        _watches.add(self)

    # -- the front end's half --------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:  # noqa: D102
        return False

    @property
    def averaged(self) -> bool:  # noqa: D102
        return False

    @property
    def first_pass(self) -> bool:  # noqa: D102
        return False

    @property
    def in_step(self) -> bool:  # noqa: D102
        return True

    def before_update(self, closure: bool) -> None:
        """``step()`` begins, with a closure or without; the optimizer's own update follows."""

    def closure_returned(self) -> None:
        """The closure of a step has computed gradients."""

    def updated(self) -> None:
        """The optimizer has updated the parameters."""

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: a state was loaded into the optimizer."""

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""

    # -- the owner -------------------------------------------------------------------------------------------------

    @property
    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps the parameters, once it is known and as long as it lives."""
        return self._owner()

    def drive(self, optimizer: torch.optim.Optimizer, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Hand over an optimizer's gradients from now on.

        Args:
            optimizer: the owner.
            arrived: a bound method, called with each parameter and its index when a backward pass has added to its
                gradient.
        """
        # The public way to give a class's step() torch's hooks again, where a script has replaced it since.
        torch.optim.Optimizer.__setstate__(optimizer, {})
        self.watched.follow(self)
        self.own(optimizer)
        parameters = enumerate(self.watched.parameters)
        hooks = [p.register_post_accumulate_grad_hook(weakly(arrived, i)) for i, p in parameters]
        self.unhook = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self.unhook.atexit = False

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer for the owner, which is not kept alive."""
        if optimizer is not self.owner:
            self.saved.follow(optimizer)
            self._owner = weakref.ref(optimizer)

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is the owner."""
        return optimizer is self.owner

    def others(self) -> list[StepWatch]:
        """Those that hand over gradients of the same parameters to another engine."""
        return [w for w in _of(self._ids) if w is not self]

    def end(self) -> None:
        """Watch no longer."""
        _watches.discard(self)

    # -- around its step -------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Closure | None:
        """Before an optimizer steps our parameters: exchange, and hide what the compressor applies.

        Returns:
            The closure that ``step()`` gets.

        Raises:
            LayoutError: it has a gradient that was not exchanged.
        """
        engine = self.watched
        if not self.owns(optimizer):
            if self._concerns(optimizer) and not broadcasting():
                if self.alone:
                    engine.adoption.refuse_second(optimizer)
                engine.results.applied()
            return closure
        self._broadcasts = broadcasting()
        if self._broadcasts:
            # It needs the momentum, which makes the buffers that it is going to overwrite with the root's, but no
            # weight decay: that would move the parameters of the ranks that loaded no checkpoint.
            engine.adoption.hide(optimizer, ("weight_decay",))
            return closure
        self.plain_step = closure is None
        self.by_scaler = steps_by_scaler()
        self.before_update(closure is not None)
        if engine.error is None:  # which is on its way to the user already
            self._refuse_strangers(optimizer)
        if self.by_scaler and self.drives and not self._scale_is_known:
            self._scale_is_known = True
            warn_of_unknown_scaler()
        engine.adoption.hide(optimizer)
        engine.results.applied()
        engine.updates.apply(optimizer)
        return None if closure is None else self._followed(closure)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step: its groups hold the user's options again, and its closure's exchange counts."""
        engine = self.watched
        if self.owns(optimizer):
            engine.adoption.show()
            engine.results.stepped()
            self.updated()
            updates = not self._broadcasts
        else:
            updates = self._concerns(optimizer) and not broadcasting()
        if updates and engine.results.undecided:
            engine.results.applied()

    def _followed(self, closure: Closure) -> Closure:
        """The closure of a step, after which its gradients are exchanged."""

        @untraced
        def followed() -> Any:
            results = self.watched.results
            results.in_closure = True
            try:
                # The optimizer runs it with its options hidden; a backward pass in it reads them.
                loss = closure()
                self.closure_returned()
                return loss
            finally:
                results.in_closure = False

        return followed

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._ids.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"])

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


def _of(ids: set[int]) -> list[StepWatch]:
    """Watches that hand over gradients of some parameters, while their owners live."""
    return [w for w in list(_watches) if w.drives and w.owner is not None and not ids.isdisjoint(w._ids)]


def require_free(parameters: Sequence[torch.Tensor], *, of_all: bool = True) -> None:
    """Refuse parameters whose gradients are exchanged already.

    Args:
        parameters: that are about to be bound.
        of_all: whether dgc's or Horovod's optimizers count, beside DDP's hook.

    Raises:
        ConfigError: they are.
    """
    if any(of_all or w.alone for w in _of({id(p) for p in parameters})):
        raise ConfigError(
            "these parameters' gradients are exchanged already, by DDP's hook or a distributed optimizer: use one of "
            "them, once, or close() the other compressor first"
        )


def learning_rates_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Those of an optimizer's groups, where they are at hand; one that lies on a GPU is not waited for."""
    rates = []
    for group in () if optimizer is None else optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.is_cpu):
            rates.append(float(rate))
    return tuple(rates)


def only_makes_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a step without a backward pass is one of ``torch.distributed.checkpoint``, for the optimizer's state.

    All gradients and learning rates are 0 in it. An exchange would send entries that are not applied.
    """
    return set(learning_rates_of(optimizer)) == {0.0} and all(
        p.grad is not None and not bool(local(p.grad).any()) for p in parameters if p.requires_grad
    )


@untraced
def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments that ``step()`` gets, if other ones; the optimizer is the first of ``args``."""
    closure = given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    for watch in list(_watches):
        closure = watch.before_step(optimizer, closure)
    if closure is given:
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


@untraced
def _after_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for watch in list(_watches):
        watch.after_step(optimizer)
