"""The part that all front ends share: what they do before and after ``step()`` of the optimizer.

A front end says when a gradient is ready and when results are needed. There are three: dgc's own optimizer
(``optimizer_front_end.py``), DDP's hook (``ddp_front_end.py``) and Horovod's own optimizer (``horovod_optimizer.py``).
A training step:

    backward()  Each gradient goes to Engine.submit.
                DDP's hook: with the last bucket Engine.finish brings the results, before backward() returns.
    step()      FrontEnd.before_step: dgc's optimizer calls Engine.finish. The options that the compressor applies are
                hidden.
                The optimizer's own step() updates the parameters. Horovod's calls Engine.finish first.
                FrontEnd.after_step, also when step() raises: the options are shown again.

docs/pytorch.md explains the rule, and docs/architecture.md the files.
"""

from __future__ import annotations

import enum
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.errors import ConfigError, LayoutError
from dgc.torch.horovod import broadcasting
from dgc.torch.scaler import Later, read_later, steps_by_scaler, warn_of_unknown_scaler
from dgc.torch.tensors import local, scattered_values
from dgc.torch.untraced import untraced, weakly

_CHANGED_RESULT = (
    "gradients were clipped or changed between the exchange and step(): with the optimizer's momentum in the "
    "compressor .grad holds a sum or mean of many gradients, which has another norm. To clip as without compression "
    "leave momentum in the optimizer (momentum=0 in the compressor); local_grad_clip_norm= of the compressor clips "
    "before momentum"
)

Closure = Callable[[], Any]

_front_ends: weakref.WeakSet[FrontEnd] = weakref.WeakSet()


class Waiting(enum.Enum):
    """What waits in ``.grad``."""

    NOTHING = "no backward pass has run since the latest step()"
    GRADIENTS = "a backward pass has run, or an exchange has begun without one; the exchange has not ended"
    RESULTS = "the exchange has ended, and step() has not used the results"


@dataclass
class Update:
    """One ``step()`` of the owner, from the hook before it to the hook after it, or to its exception.

    Attributes:
        by_closure: whether a closure computes the gradients inside ``step()``.
        names_closure: whether ``step`` was called with the keyword ``closure=``, even if it is None.
        unmoved: parameters that this ``step()`` must not move, and copies of them.
    """

    by_closure: bool = False
    names_closure: bool = False
    unmoved: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class FrontEnd:
    """Submits gradients to one engine, and acts before and after ``step()`` of the optimizer that owns the parameters.

    Attributes:
        engine: an :class:`~dgc.torch.engine.Engine` or a :class:`~dgc.torch.dense.DenseEngine`.
        update: the owner's ``step()`` that is running; None if none is.
        drives: whether this object submits gradients.
        holds: whether gradients are checked once more before the last bucket is sent.
        exclusive: whether wrapping another optimizer over the same parameters is an error.
        update_follows: whether ``step()`` itself asked for the latest results, so that no script sees them before.
        rebuild: a text that says what the script must do after parameters were added or unfrozen.
    """

    rebuild = "build a new optimizer and wrap it"
    drives = holds = exclusive = update_follows = False
    _warned_of_change = False
    _sample: tuple[torch.Tensor, torch.Tensor] | None = None  # the smallest result's parameter, and some of its values
    _compared: Callable[[], bool] | None = None  # returns whether the latest sample was changed before step()
    update: Update | None = None
    _waiting = Waiting.NOTHING
    _replaced = False  # whether another optimizer with parameters of the owner was wrapped later
    _unhook: Callable[[], object] | None = None  # removes the hooks of :meth:`drive`

    def __init__(self, engine: Any) -> None:
        follow_steps(_before_any_step, end_update)
        self.engine = engine
        self._owner: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._ids = {id(p) for p in engine.parameters}
        self.follow_steps()

    def follow_steps(self) -> None:
        """Be called before and after each ``step()`` of any optimizer, until :meth:`end`."""
        _front_ends.add(self)

    @property
    def waiting(self) -> Waiting:
        """What waits in ``.grad``."""
        return self._waiting

    # -- front ends override these -----------------------------------------------------------------------------------

    def end_exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the results, because ``step()`` needs them now; or check that they are there."""

    def end_exchange_of_closure(self) -> None:
        """Get the results of the gradients that the closure of a ``step()`` has computed."""

    def begin_anew(self) -> None:
        """Forget all gradients of the step: the next backward pass is the first of a new step."""

    def give_up(self, through: bool = False) -> None:
        """Forget the gradients of a step that has not ended; the next backward pass begins a new step.

        ``through`` says that all ranks had submitted all gradients.
        """
        self.begin_anew()

    # -- the owner ---------------------------------------------------------------------------------------------------

    @property
    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps the parameters, if it is known and still exists."""
        return self._owner()

    def drive(self, optimizer: torch.optim.Optimizer, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Call ``arrived`` with the index of each gradient that a backward pass has added to."""
        # If a script has replaced a class's step(), this is the public way to add torch's hooks to the new one.
        torch.optim.Optimizer.__setstate__(optimizer, {})
        self.engine.follow(self)
        self.own(optimizer)
        parameters = enumerate(self.engine.parameters)
        hooks: list[Any] = [p.register_post_accumulate_grad_hook(weakly(arrived, i)) for i, p in parameters]
        if len(hooks) == 1:  # .grad must be checked before a backward pass adds to it
            hooks.append(self.engine.parameters[0].register_hook(weakly(self._before_only_gradient)))
        self._unhook = unhook = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        unhook.atexit = False
        self.drives = True

    def _before_only_gradient(self, _: torch.Tensor) -> None:
        if self._waiting is not Waiting.GRADIENTS:
            self.engine.refuse_results()

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer the owner, without keeping it alive."""
        if optimizer is not self.owner:
            self.engine.saved.follow(optimizer)
            self._owner = weakref.ref(optimizer)
            _end_update_after_errors(optimizer)

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is the owner."""
        return optimizer is self._owner()

    def others(self) -> list[FrontEnd]:
        """List the front ends that submit gradients of the same parameters to another engine."""
        return [each for each in front_ends(self._ids) if each is not self]

    def end(self) -> None:
        """Submit no more gradients: the compressor is closed, or another front end replaces this one."""
        _front_ends.discard(self)
        self.drives = False
        if self._unhook is not None:
            self._unhook()

    # -- around step() -----------------------------------------------------------------------------------------------

    def before_step(
        self, optimizer: torch.optim.Optimizer, closure: Closure | None, names_closure: bool
    ) -> Closure | None:
        """Exchange before an optimizer's ``step()``, or after its closure. Return the closure to call."""
        if not self.owns(optimizer):
            self._refuse_stranger(optimizer)
            return closure
        calls_super, self.update = self.update is not None, self.update or Update()
        update = self.update
        update.by_closure |= closure is not None
        update.names_closure |= names_closure
        if self.engine.saved.pending.broadcast and self.waiting is not Waiting.GRADIENTS and broadcasting():
            # Ranks without a state make one in this step; the root's state will overwrite it. No parameter may move.
            self.engine.adoption.hide(optimizer, ("weight_decay",))
            before = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
            update.unmoved = update.unmoved or before
            return closure
        if calls_super and closure is None and self.waiting is Waiting.RESULTS:
            self.begin_update(optimizer)
            return closure
        is_first = self.engine.by_scaler is None
        if is_first:
            self.engine.by_scaler = steps_by_scaler()
        if closure is not None:
            return self._followed(closure, optimizer)
        self.end_exchange(optimizer)
        if is_first and self.engine.by_scaler:
            warn_of_unknown_scaler()
        self.begin_update(optimizer)
        return None

    def _refuse_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        if self.update is not None or self._replaced or hasattr(optimizer, "skip_synchronize"):
            return  # this optimizer is a part of the owner, or exchanges these gradients itself, with its own checks
        if self.owns(unwrapped(optimizer)):
            return  # its step() calls the owner's
        if not self._ids.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            self.engine.adoption.refuse_another(optimizer)

    def _followed(self, closure: Closure, optimizer: torch.optim.Optimizer) -> Closure:
        """Return a closure that also exchanges the gradients. The optimizer updates the parameters after that."""

        @untraced
        def followed() -> Any:
            self.engine.adoption.show()  # an optimizer may call its closure more than once
            loss = closure()
            self.end_exchange_of_closure()
            self.begin_update(optimizer)
            return loss

        return followed

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """After the exchange, hide the options that the compressor applies."""
        if self.engine.error is None:  # otherwise it is being raised already
            self._refuse_strange_gradients(optimizer)
        self._look_for_change()
        if self.update is not None and self.update.names_closure and self.only_makes_state(optimizer):
            # SGD makes its momentum buffers, of zeros. Torch's distributed checkpoints load only into such entries.
            self.engine.adoption.hide(optimizer, ("weight_decay",))
        else:
            self.engine.adoption.hide(optimizer)

    def keep_sample(self, results: Mapping[int, torch.Tensor]) -> None:
        """Copy some values of the smallest result, to notice on rank 0 whether the script changes a velocity."""
        self._sample, engine = None, self.engine
        if self._warned_of_change or not results or not engine.adoption.has_velocity or engine.transport.rank:
            return
        self._warn_of_change()
        index = min(results, key=lambda i: results[i].numel())
        self._sample = engine.parameters[index], scattered_values(results[index])

    def _look_for_change(self) -> None:
        sample, self._sample = self._sample, None
        if sample is None or (gradient := sample[0].grad) is None:
            return
        scale = self.engine.exchange.loss_scale
        divisor = scale() if callable(scale) else scale
        self._compared = partial(_is_changed, read_later(sample[1]), read_later(scattered_values(gradient)), divisor)
        if not gradient.is_cuda:  # otherwise the next step will warn: a warning is no reason to wait for the device
            self._warn_of_change()

    def _warn_of_change(self) -> None:
        compared, self._compared = self._compared, None
        if compared is not None and compared():
            self._warned_of_change = True
            warnings.warn(_CHANGED_RESULT, RuntimeWarning, stacklevel=6)

    def _refuse_strange_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients of parameters that were frozen or missing at the wrapping: these are not averaged."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._ids and p.requires_grad and p.grad is not None:
                    raise LayoutError(
                        f"a parameter of shape {tuple(p.shape)} was not there, or needed no gradient, when the "
                        f"compressor was built but has one now, which is not averaged: {self.rebuild} after adding or "
                        "unfreezing parameters"
                    )

    def only_makes_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``torch.distributed.checkpoint`` has called ``step()`` to initialise the optimizer's state.

        It gives all parameters gradients of 0, sets all learning rates to 0 and calls ``step(closure=None)``. An
        exchange would send entries that are not applied. Without ``closure=None`` this rank is training, even if its
        gradients and learning rates are 0, and the others wait for it.
        """
        if self.update is None or not self.update.names_closure or set(learning_rates_of(optimizer)) != {0.0}:
            return False  # in nearly all steps
        gradients = [p.grad for p in self.engine.parameters if p.requires_grad]
        return all(g is not None and not bool(local(g).any()) for g in gradients)

    def after_step(self) -> None:
        """Show the user's options again, and note that the results were used."""
        update, self.update = self.update, None
        self.engine.adoption.show()
        if self._waiting is Waiting.RESULTS:
            self._waiting = Waiting.NOTHING
        if update is not None and update.unmoved:
            with torch.no_grad():
                for p, before in update.unmoved:
                    p.copy_(before)


def _is_changed(before: Later, now: Later, divisor: float | Callable[[], float]) -> bool:
    """Return whether values differ, other than by a GradScaler's division by its scale."""
    divisors = 1.0, divisor() if callable(divisor) else divisor
    return not any(torch.allclose(now(), before() / by, rtol=1e-3, equal_nan=True) for by in divisors)


def changed_gradient(engine: Any, index: int) -> LayoutError:
    """Return the error about a gradient that was changed or replaced while it was exchanged."""
    clip = "call optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize()"
    if engine.adoption.has_velocity:
        clip = (
            "to clip, give the compressor local_grad_clip_norm=, or momentum=0 to clip after optimizer.synchronize(); "
            "to unscale, call synchronize() first, then step() inside optimizer.skip_synchronize()"
        )
    return LayoutError(
        f"the gradient of {engine.names[index]!r} was changed or replaced while it was exchanged, which begins in "
        f"backward(): {clip}. Register a hook that changes gradients before the optimizer is wrapped"
    )


def _end_update_after_errors(optimizer: torch.optim.Optimizer) -> None:
    """Call :meth:`FrontEnd.after_step` also when ``step()`` raises an error, because torch calls no hook then.

    Schedulers wrap ``step()`` in the same way. The hooks begin every update and end those without an error, because a
    script may call a ``step()`` that it has read from the optimizer before the wrapping, as Accelerate does.
    """
    step, living = optimizer.step, weakref.ref(optimizer)
    function = getattr(step, "__func__", lambda _, *args, **kwargs: step(*args, **kwargs))
    if hasattr(step, "ends_after_errors"):
        return

    @untraced
    def stepping(_: object, *args: Any, **kwargs: Any) -> Any:
        this = living()
        assert this is not None, "it steps"
        try:
            return function(this, *args, **kwargs)
        except BaseException:
            end_update(this)
            raise

    vars(stepping).update(vars(getattr(step, "__func__", step)), ends_after_errors=True)
    vars(optimizer)["step"] = types.MethodType(stepping, weakref.proxy(optimizer))


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that a wrapper holds as ``optimizer``, as Accelerate's, Lightning's and Lookahead do."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def front_ends(ids: set[int]) -> list[FrontEnd]:
    """List the front ends that submit gradients of some of these parameters, and whose owners still exist."""
    living = [each for each in list(_front_ends) if each.drives and each.owner is not None]
    return [each for each in living if not ids.isdisjoint(each._ids)]


def require_free(parameters: Sequence[torch.Tensor], *, exclusively: bool = False) -> None:
    """Refuse parameters whose gradients are exchanged already.

    With ``exclusively``, consider only front ends that have the attribute ``exclusive``.
    """
    if any(each.exclusive or not exclusively for each in front_ends({id(p) for p in parameters})):
        raise ConfigError(
            "these parameters' gradients are exchanged already, by DDP's hook or a distributed optimizer: use one of "
            "them, once, or close() the other compressor first"
        )


def learning_rates_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Return the learning rates of an optimizer's groups, except those on a GPU, as the host would wait for these."""
    rates = []
    for group in () if optimizer is None else optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.is_cpu):
            rates.append(float(rate))
    return tuple(rates)


@functools.cache
def follow_steps(before: Callable[..., Any], after: Callable[..., None]) -> None:
    """Call two functions around ``step()`` of every optimizer from now on, as torch's global hooks.

    The hooks are never removed: an object may be garbage-collected inside the loop in which torch calls them.
    """
    register_optimizer_step_pre_hook(untraced(before))
    register_optimizer_step_post_hook(untraced(after))


def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the new arguments for ``step()``, or None if they stay. ``args`` begins with the optimizer."""
    named = "closure" in kwargs
    closure = given = kwargs["closure"] if named else args[1] if len(args) > 1 else None
    for each in list(_front_ends):
        closure = each.before_step(optimizer, closure, named)
    if closure is given:
        return None
    return (args, {**kwargs, "closure": closure}) if named else ((args[0], closure, *args[2:]), kwargs)


def end_update(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Call :meth:`FrontEnd.after_step`, after a ``step()`` or when it has raised.

    Torch calls no hook after an error. A function that calls torch's step hooks itself, without ``optimizer.step()``,
    must therefore call this one when the update raises.
    """
    for each in list(_front_ends):
        if each.owns(optimizer):
            each.after_step()
