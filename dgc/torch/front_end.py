"""What the front ends share: hooks before and after ``step()`` of the optimizer whose parameters an engine exchanges.

A front end says when a gradient is there and when results are needed. There are three: dgc's own optimizer
(``optimizer.py``), DDP's hook (``ddp.py``) and Horovod's own optimizer (``horovod_optimizer.py``). A step is a
transaction of the :class:`~dgc.torch.engine.Engine`; docs/steps.md has the rule.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.errors import ConfigError, LayoutError
from dgc.torch.horovod import broadcasting
from dgc.torch.saved_state import SavedState
from dgc.torch.scaler import steps_by_scaler, warn_of_unknown_scaler
from dgc.torch.tensors import local
from dgc.torch.untraced import untraced, weakly

# Takes the gradient's name.
CHANGED = (
    "the gradient of {!r} was changed or replaced while it was exchanged, which begins in backward(): call "
    "optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize(); register a "
    "hook that changes gradients before the optimizer is wrapped"
)

_REBUILD = "build a new optimizer and wrap it"

Closure = Callable[[], Any]

_front_ends: weakref.WeakSet[FrontEnd] = weakref.WeakSet()
_hooks: list[Any] = []


class FrontEnd:
    """Hands one engine its gradients, and acts before and after ``step()`` of the optimizer that owns the parameters.

    Attributes:
        engine: the :class:`~dgc.torch.engine.Engine`, which holds its front end itself.
        saved: what was loaded into the owner since its last step.
        drives: whether this object hands over gradients.
        holds: whether gradients are checked once more before the last bucket is sent.
        begun: whether a backward pass has run for a step that is not exchanged yet.
        averaged: whether gradients were exchanged, and no backward pass has run after that.
        in_step: whether ``step()`` ends the exchange now, and the update follows before the script sees gradients.
        by_scaler: whether a GradScaler calls ``step()`` whose scale the compressor does not know. Asked once.
        exclusive: whether wrapping another optimizer over the same parameters is an error.
        rebuild: what the script has to do after parameters were added or unfrozen.
    """

    rebuild = _REBUILD

    drives = holds = begun = averaged = in_step = by_scaler = exclusive = False
    _stepping = False  # from the hook before step() to the one after it
    _updating = False  # the same, once the gradients are exchanged
    _replaced = False  # another optimizer with parameters of the owner was wrapped since
    _unhook: Callable[[], object] | None = None  # removes the hooks of :meth:`drive`

    def __init__(self, engine: Any) -> None:
        # Two hooks of torch serve all front ends and stay: removing hooks when a front end is collected could happen
        # in the very loop in which torch calls them.
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_any_step))
            _hooks.append(register_optimizer_step_post_hook(_after_any_step))
        self.engine = engine
        self.saved = SavedState(engine.adoption, self.begin_anew)
        self._scale_is_known = engine.is_scaled
        self._owner: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._ids = {id(p) for p in engine.parameters}
        self._unmoved: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters before a step of Horovod's, as copies
        _front_ends.add(self)

    # -- each front end has its own ----------------------------------------------------------------------------------

    def ends_in_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether nothing of the script's runs between the exchange and the update of a ``step()``."""
        return False

    def end_exchange(self) -> None:
        """``step()`` needs the results: wait for them, or see that they are there."""

    def end_exchange_of_closure(self) -> None:
        """The closure of a ``step()`` has computed gradients, whose results are needed."""
        self.end_exchange()

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: a state was loaded into the optimizer."""

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""

    # -- the owner ---------------------------------------------------------------------------------------------------

    @property
    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps the parameters, once it is known and as long as it lives."""
        return self._owner()

    def drive(self, optimizer: torch.optim.Optimizer, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Call ``arrived`` with the index of each gradient that a backward pass has added to."""
        # The public way to give a class's step() torch's hooks again, where a script has replaced it since.
        torch.optim.Optimizer.__setstate__(optimizer, {})
        self.engine.follow(self)
        self.own(optimizer)
        parameters = enumerate(self.engine.parameters)
        hooks: list[Any] = [p.register_post_accumulate_grad_hook(weakly(arrived, i)) for i, p in parameters]
        if len(hooks) == 1:  # no other gradient shows what was left in .grad
            hooks.append(self.engine.parameters[0].register_hook(weakly(self._before_only_gradient)))
        self._unhook = unhook = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        unhook.atexit = False

    def _before_only_gradient(self, _: torch.Tensor) -> None:
        if not self.begun:
            self.engine.refuse_results()

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer for the owner, which is not kept alive."""
        if optimizer is not self.owner:
            self.saved.follow(optimizer)
            self._owner = weakref.ref(optimizer)
            _end_step_after_errors(optimizer)

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is the owner."""
        return optimizer is self.owner

    def others(self) -> list[FrontEnd]:
        """List the front ends that hand over gradients of the same parameters to another engine."""
        return [each for each in _of(self._ids) if each is not self]

    def end(self) -> None:
        """Hand over nothing any more: the compressor is closed, or another front end follows."""
        _front_ends.discard(self)
        self.drives = False
        if self._unhook is not None:
            self._unhook()

    # -- around step() -----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Closure | None:
        """Exchange before an optimizer's ``step()``, or once its closure returns; returns the closure to be called."""
        if not self.owns(optimizer):
            self._refuse_stranger(optimizer)
            return closure
        self._stepping = True
        if self._updating and closure is None:  # a class of the user's, or of Horovod's, calls super().step()
            self.begin_update(optimizer)
            return closure
        if self.saved.pending.broadcast and not self.begun and broadcasting():
            # Ranks without a state get one in this step, which the root's will overwrite: buffers of 0, where the
            # compressor has the decay. No parameter may move.
            self.engine.adoption.hide(optimizer, ("weight_decay",))
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._unmoved = self._unmoved or [(p, p.detach().clone()) for p in parameters]
            return closure
        if not self._scale_is_known:
            self._scale_is_known, self.by_scaler = True, steps_by_scaler()
        if closure is not None:
            return self._followed(closure, optimizer)
        self.in_step = self.ends_in_step(optimizer)
        self.end_exchange()
        self.begin_update(optimizer)
        return None

    def _refuse_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stepping or self._replaced or hasattr(optimizer, "skip_synchronize"):
            return  # a part of the owner, or one that exchanges these gradients itself and refuses what is wrong
        if not self._ids.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            self.engine.adoption.refuse_another(optimizer)

    def update_ended(self) -> None:
        """The next step has begun: an update that an exception ended is over, too."""
        self._updating = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Show the user's options again; the results are used up."""
        if self.owns(optimizer):
            self.engine.adoption.show()
            self.averaged = self.in_step = self._stepping = self._updating = False
            unmoved, self._unmoved = self._unmoved, []
            with torch.no_grad():
                for p, before in unmoved:
                    p.copy_(before)

    def _followed(self, closure: Closure, optimizer: torch.optim.Optimizer) -> Closure:
        """Return a closure that also exchanges the gradients; the optimizer's update follows it."""

        @untraced
        def followed() -> Any:
            self.engine.adoption.show()  # an optimizer may call its closure more than once
            loss = closure()
            self.end_exchange_of_closure()
            self.begin_update(optimizer)
            return loss

        return followed

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are exchanged: hide the options that the compressor applies, and apply deferred results."""
        engine, self._updating = self.engine, True
        if engine.error is None:  # else it is on its way to the user
            refuse_strange_gradients(optimizer, self._ids, self.rebuild)
        if self.by_scaler and self.drives:
            self.by_scaler = False
            warn_of_unknown_scaler()
        engine.adoption.hide(optimizer)
        engine.updates.apply(optimizer)


def _end_step_after_errors(optimizer: torch.optim.Optimizer) -> None:
    """End a ``step()`` that raises as :meth:`FrontEnd.after_step` does, for which torch calls no hook.

    Schedulers wrap ``step()`` in the same way.
    """
    step, living = optimizer.step, weakref.ref(optimizer)
    function = getattr(step, "__func__", lambda _, *args, **kwargs: step(*args, **kwargs))
    if hasattr(step, "ends_after_errors"):
        return

    @untraced
    def stepping(_: object, *args: Any, **kwargs: Any) -> Any:
        this = living()
        try:
            return function(this, *args, **kwargs)
        except BaseException:
            end_failed_step(this)
            raise

    vars(stepping).update(vars(getattr(step, "__func__", step)), ends_after_errors=True)
    vars(optimizer)["step"] = types.MethodType(stepping, weakref.proxy(optimizer))


def end_failed_step(optimizer: torch.optim.Optimizer | None) -> None:
    """Show the user's options again after a step that raised."""
    for each in list(_front_ends):
        if optimizer is not None and optimizer is each.owner:
            each.after_step(optimizer)


def refuse_strange_gradients(optimizer: torch.optim.Optimizer, ids: set[int], rebuild: str = _REBUILD) -> None:
    """Refuse gradients that are not averaged: their parameters were frozen or missing when it was wrapped."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in ids and p.requires_grad and p.grad is not None:
                raise LayoutError(
                    f"a parameter of shape {tuple(p.shape)} was not there, or needed no gradient, when the "
                    f"compressor was built but has one now, which is not averaged: {rebuild} after adding or "
                    "unfreezing parameters"
                )


def _of(ids: set[int]) -> list[FrontEnd]:
    """List the front ends that hand over gradients of some parameters, while their owners live."""
    living = [each for each in list(_front_ends) if each.drives and each.owner is not None]
    return [each for each in living if not ids.isdisjoint(each._ids)]


def require_free(parameters: Sequence[torch.Tensor], *, exclusively: bool = False) -> None:
    """Refuse parameters whose gradients are exchanged already; ``exclusively``: by a front end that bears no other."""
    if any(each.exclusive or not exclusively for each in _of({id(p) for p in parameters})):
        raise ConfigError(
            "these parameters' gradients are exchanged already, by DDP's hook or a distributed optimizer: use one of "
            "them, once, or close() the other compressor first"
        )


def learning_rates_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Return those of an optimizer's groups, but none that lies on a GPU: it would have to be waited for."""
    rates = []
    for group in () if optimizer is None else optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.is_cpu):
            rates.append(float(rate))
    return tuple(rates)


def only_makes_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a step without a backward pass is one of ``torch.distributed.checkpoint``, for optimizer state.

    All gradients and learning rates are 0 in it. An exchange would send entries that are not applied.
    """
    return set(learning_rates_of(optimizer)) == {0.0} and all(
        p.grad is not None and not bool(local(p.grad).any()) for p in parameters if p.requires_grad
    )


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure among the arguments of a step hook, the optimizer first; None if there is none."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> Any:
    """Return these arguments with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


@untraced
def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that ``step()`` gets, if other ones; the optimizer is the first of ``args``."""
    closure = given = closure_of(args, kwargs)
    for each in list(_front_ends):
        closure = each.before_step(optimizer, closure)
    return None if closure is given else with_closure(args, kwargs, closure)


@untraced
def _after_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for each in list(_front_ends):
        each.after_step(optimizer)
