"""What happens around an optimizer's ``step()``.

:class:`Results` knows whether the latest results were used. A :class:`StepWatch` knows who steps the parameters,
and what is done before and after that; each front end derives one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.core.exchange.exchange import Exchange, Stage
from dgc.errors import ConfigError, LayoutError
from dgc.torch.horovod import broadcasting, stepping_scaler
from dgc.torch.saved_state import SavedState
from dgc.torch.tensors import local
from dgc.torch.untraced import untraced, weakly

CHANGED = (
    "the gradient of {!r} was changed or replaced while it was exchanged, which begins in backward(): call "
    "optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize(); register a "
    "hook that changes gradients before the optimizer is wrapped"
)
"""What a gradient's name is put into."""

_Scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
"""Where torch has it: ``torch.amp`` since 2.3."""


def read_scale(scaler: Any) -> float | Callable[[], float]:
    """The scale of this step's gradients; of a scaler on a GPU a function that waits for it, and nothing waits here."""
    scale = getattr(scaler, "_scale", None)
    if not (isinstance(scale, torch.Tensor) and scale.is_cuda and scaler.is_enabled()):
        return scaler.get_scale()
    return read_later(scale)


def read_later(scale: torch.Tensor) -> Callable[[], float]:
    """Begin to copy one value from a GPU; what comes back waits for it, without turning on a core."""
    host = torch.empty(scale.shape, dtype=scale.dtype, pin_memory=True)
    host.copy_(scale, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(scale.device))

    def value() -> float:
        event.synchronize()
        return float(host.item())

    return value


def is_changed(p: torch.Tensor, gradient: torch.Tensor, version: int) -> bool:
    """Whether a parameter's gradient was replaced, or changed in place since it had this version."""
    if p.grad is not gradient:
        return True
    if gradient._version == version:
        return False
    return gradient.is_sparse or gradient.untyped_storage().nbytes() <= gradient.nbytes  # parts of a buffer have one


def steps_by_scaler() -> bool:
    """Whether a scaler steps the optimizer that is about to step."""
    scaler = stepping_scaler(_Scaler)
    return scaler is not None and scaler.is_enabled()


def has_unscaled(scaler: object, optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's scaler has divided the gradients of an optimizer since its latest ``update()``."""
    states = scaler._per_optimizer_states if isinstance(scaler, _Scaler) and scaler.is_enabled() else {}
    return bool(states.get(id(optimizer), {}).get("found_inf_per_device"))


def warn_of_unknown_scaler() -> None:
    """Warn that a scaler steps an optimizer; no error: a script may divide its gradients before they are exchanged."""
    warnings.warn(
        "a GradScaler steps this optimizer, and the compressor does not know its scale: unless gradients are "
        "divided by it before they are exchanged, momentum, weight decay and residuals mix gradients of "
        "different scales. Pass it to the compressor: Compression.dgc(loss_scale=scaler)",
        RuntimeWarning,
        stacklevel=4,
    )


class Results:
    """The latest step's results in ``.grad``.

    Attributes:
        undecided: whether no optimizer has used them.
        cleared: whether the owner's ``zero_grad()`` has run since: whatever is in ``.grad`` from then on is no result.
        kept: whether the step that began last found gradients where the one before had left them, also cleared in
            place; None where that had left none.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], exchanges: Sequence[Exchange]) -> None:
        self._parameters = parameters
        self._exchanges = exchanges
        self._written: list[weakref.ref[torch.Tensor] | None] = []  # the latest step's gradients by index
        self.cleared = self.undecided = False
        self.kept: bool | None = None

    @property
    def stand(self) -> bool:
        """Whether any of the latest step's results is still in ``.grad``."""
        return not self.cleared and bool(self._there())

    def written(self) -> None:
        """The exchange has finished a step, which was not applied yet."""
        self.cleared, self.undecided = False, self._exchanges[0].latest.stage is Stage.COMMITTED
        self._written = [None if p.grad is None or p.grad.is_sparse else weakref.ref(p.grad) for p in self._parameters]

    def applied(self) -> None:
        """An optimizer steps the parameters now, or has done so since a closure exchanged their gradients."""
        self.undecided = False

    def moved(self, index: int) -> None:
        """DDP may have moved gradients to new buckets: what was not cleared is in ``.grad``, as another tensor."""
        for i, (p, ref) in enumerate(zip(self._parameters, self._written, strict=False)):
            if i != index and ref is not None and p.grad is not None:
                self._written[i] = weakref.ref(p.grad)

    def next_begins(self, index: int | None = None) -> bool:
        """The first gradient of the next step is there, of this parameter, or None: the latest step is over.

        Returns:
            Whether the results of the latest step are still in ``.grad``, other than 0, and are sent again.
        """
        found = self._there()
        self.kept = bool(found) if any(self._written) else None
        left = False
        if found and not self.cleared and (self.undecided or index is None):
            others = [gradient for i, gradient in found.items() if i != index]
            left = not others or any(bool(local(gradient).any()) for gradient in others)
        self.undecided, self._written = False, []
        return left

    def _there(self) -> dict[int, torch.Tensor]:
        """By index, the latest step's gradients that are where they were."""
        there = {}
        for i, ref in enumerate(self._written):
            if ref is not None and (gradient := self._parameters[i].grad) is not None and gradient is ref():
                there[i] = gradient
        return there


def refusal_of_results(*, undecided: bool, velocity: bool, unwritten: bool) -> ConfigError | None:
    """Why results that are still in ``.grad`` cannot be exchanged as gradients; None if they can.

    They were not applied and a backward pass was added to them (``undecided``), hold momentum or decay that the
    compressor applies (``velocity``), or were applied without all being written (``unwritten``).
    """
    if velocity and undecided:
        return ConfigError(
            "backward() ran after synchronize() without step() or zero_grad(): .grad holds the step's result, with the "
            "momentum and weight decay that the compressor applies, and cannot take in another gradient; accumulate "
            "with backward_passes_per_step (DDP: inside no_sync()), clear the gradients in between with "
            "optimizer.zero_grad(), or leave both in the optimizer: momentum=0 in the compressor"
        )
    if velocity:
        return ConfigError(
            "call optimizer.zero_grad() between two step() of one backward(): .grad still held what the last step() "
            "applied, with the momentum and weight decay that the compressor applies, which cannot be taken for a "
            "gradient. With momentum=0 in the compressor both stay in the optimizer"
        )
    if unwritten:
        return ConfigError(
            "call optimizer.zero_grad() between two step() of one backward(), or give the compressor "
            "sparse_updates=False: the last one has applied its results without writing them to .grad, where dense "
            "training finds and applies them again"
        )
    return None


_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_hook: list[Any] = []


Closure = Callable[[], Any]


class StepWatch:
    """Follows the steps of the optimizer that owns an engine's parameters, until :meth:`end` or collected.

    A front end derives one that hands over gradients: dgc's own (``optimizer.py``), Horovod's (``stock.py``), DDP's.

    Attributes:
        engine: the :class:`~dgc.torch.engine.Engine`, which holds a watch itself.
        saved: what was loaded into the owner since its last step.
        plain_step: whether ``step()`` was called without a closure, and has exchanged nothing yet.
        by_scaler: whether a GradScaler calls ``step()`` whose scale the compressor does not know. Looked at once.
        drives: whether this object hands over gradients.
        holds: whether gradients are looked at once more before the last bucket is sent.
        begun: whether a backward pass has run for a step that is not exchanged yet.
        averaged: whether gradients were exchanged, and no backward pass has run after that.
        in_step: whether ``step()`` exchanges now, so that no code of the script sees gradients before the update.
        unhook: ends the calls of :meth:`drive`, where that was called.
        alone: whether no other optimizer may have momentum or decay for these parameters, or be distributed over them.
    """

    plain_step = by_scaler = drives = alone = holds = _broadcasts = False

    def __init__(self, engine: Any) -> None:
        """Watch from now on.

        Two hooks of torch serve all watches and stay for good: removing hooks when a watch is collected could fall
        into the very loop in which torch calls them.
        """
        self.engine = engine
        self.saved = SavedState(engine.adoption, self.begin_anew)
        self._scale_is_known = engine.is_scaled  # or known to be none
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
        """Hand over an optimizer's gradients from now on."""
        # The public way to give a class's step() torch's hooks again, where a script has replaced it since.
        torch.optim.Optimizer.__setstate__(optimizer, {})
        self.engine.follow(self)
        self.own(optimizer)
        parameters = enumerate(self.engine.parameters)
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
        """Before an optimizer steps our parameters: exchange, and hide what the compressor applies."""
        engine = self.engine
        if not self.owns(optimizer):
            if self._concerns(optimizer):
                if self.alone and not engine.adoption.hides:  # or the owner's own step calls that of another one
                    engine.adoption.refuse_another(optimizer)
                engine.results.applied()
            return closure
        self._broadcasts = self.saved.pending.broadcast and not self.begun and broadcasting()
        if self._broadcasts:
            # It needs the momentum, which makes the buffers that it is going to overwrite with the root's, but no
            # weight decay: that would move the parameters of the ranks that loaded no checkpoint.
            engine.adoption.hide(optimizer, ("weight_decay",))
            return closure
        self.plain_step = closure is None
        if not self._scale_is_known:
            self._scale_is_known, self.by_scaler = True, steps_by_scaler()
        self.before_update(closure is not None)
        if engine.error is None:  # which is on its way to the user already
            refuse_strangers(optimizer, self._ids)
        if self.by_scaler and self.drives:
            self.by_scaler = False
            warn_of_unknown_scaler()
        engine.adoption.hide(optimizer)
        engine.results.applied()
        engine.updates.apply(optimizer)
        return None if closure is None else self._followed(optimizer, closure)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step: its groups hold the user's options again, and its closure's exchange counts."""
        engine = self.engine
        if self.owns(optimizer):
            engine.adoption.show()
            self.updated()
            if not self._broadcasts:
                engine.results.applied()
        elif self._concerns(optimizer):
            engine.results.applied()

    def _followed(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Closure:
        """Return the closure of a step with the exchange of the gradients that it computes."""

        @untraced
        def followed() -> Any:
            adoption = self.engine.adoption
            adoption.show()  # which of them are hidden is known once the closure's backward pass has read them
            loss = closure()
            self.closure_returned()
            adoption.hide(optimizer)
            return loss

        return followed

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._ids.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"])


def refuse_strangers(optimizer: torch.optim.Optimizer, ids: set[int]) -> None:
    """Refuse gradients of parameters of which none is averaged: frozen or missing when the optimizer was wrapped."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in ids and p.requires_grad and p.grad is not None:
                raise LayoutError(
                    f"a parameter of shape {tuple(p.shape)} was not there, or needed no gradient, when the "
                    "compressor was built but has one now, which is not averaged: build a new optimizer and "
                    "wrap it after adding or unfreezing parameters"
                )


def _of(ids: set[int]) -> list[StepWatch]:
    """Watches that hand over gradients of some parameters, while their owners live."""
    return [w for w in list(_watches) if w.drives and w.owner is not None and not ids.isdisjoint(w._ids)]


def require_free(parameters: Sequence[torch.Tensor], *, of_all: bool = True) -> None:
    """Refuse parameters whose gradients are exchanged already."""
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


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among what a step hook gets, the optimizer first; None if there is none."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> Any:
    """These arguments with another closure in its place."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


@untraced
def _before_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments that ``step()`` gets, if other ones; the optimizer is the first of ``args``."""
    closure = given = closure_of(args, kwargs)
    for watch in list(_watches):
        closure = watch.before_step(optimizer, closure)
    return None if closure is given else with_closure(args, kwargs, closure)


@untraced
def _after_any_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for watch in list(_watches):
        watch.after_step(optimizer)
