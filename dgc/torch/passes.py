"""What dgc's optimizers for torch share, dense or compressed: backward passes are counted, and Horovod's methods."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.distributed import ddp_over
from dgc.torch.step import CHANGED, has_unscaled, is_changed
from dgc.torch.tensors import is_sharded, scattered_values
from dgc.torch.untraced import untraced, weakly

_IN_DDP = (
    "the model is trained in DistributedDataParallel, which averages gradients itself: leave the optimizer plain and "
    "call dgc.ddp.register(model, optimizer, compression), or leave DistributedDataParallel out"
)

_all: weakref.WeakSet[Passes] = weakref.WeakSet()
"""Wrapping another optimizer over the same parameters ends theirs."""


class Exchanged(NamedTuple):
    """A gradient whose exchange has begun, in which it must not change, its version then, and where its result goes.

    Whether the exchange has read a gradient before or after a change of it is a matter of chance.
    """

    gradient: torch.Tensor
    version: int
    result: torch.Tensor
    values: torch.Tensor | None  # a few, of a sharded one, whose version does not always rise


class Passes:
    """One optimizer's parameters: a gradient is handed over after so many backward passes, and waited for in a step.

    Attributes:
        begun: whether a backward pass has run for a step that is not exchanged yet.
        averaged: whether gradients were exchanged, and no backward pass has run after that.
    """

    begun = averaged = False
    _skipping = _replaced = False
    _is_first = True
    _passes = 1
    _scaler: object = None  # a GradScaler perhaps, whose scale the exchange knows
    _owner: Callable[[], torch.optim.Optimizer | None]

    def count_passes(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Begin, with the parameters whose gradients are exchanged; another optimizer's exchange of them ends."""
        self._parameters, self._names = parameters, names
        self._sharded = {i for i, p in enumerate(parameters) if is_sharded(p)}
        self._exchanged: dict[int, Exchanged] = {}  # by index
        self._guarded: dict[int, Any] = {}  # by id of a DistributedDataParallel: its hook
        self._guard()
        self.begin_anew()
        ids = set(map(id, parameters))
        for other in list(_all):  # somebody may still refer to those optimizers
            if not ids.isdisjoint(map(id, other._parameters)):
                other.give_up()
                other._replaced = True
                other.unguard()
        _all.add(self)

    # -- Horovod's methods -----------------------------------------------------------------------------------------

    @untraced
    def synchronize(self) -> None:
        """Exchange the gradients and wait for the results, which are in ``.grad`` then; again, it does nothing.

        Raises:
            ConfigError: another optimizer over these parameters was wrapped since, or a gradient is sparse.
            LayoutError: a gradient was changed, replaced or cleared while it was exchanged.
            DGCError: this or another rank failed.
        """
        if self._replaced:
            raise ConfigError(
                "another optimizer with parameters of this one was wrapped since: step that one, and drop this one"
            )
        if self.averaged and self.is_done():
            return
        self.averaged = False
        for i, p in enumerate(self._parameters):
            if i not in self._exchanged:
                self.hand_over(i, p)
        self.require_unchanged()
        self.deliver()
        self.begin_anew()
        self.averaged = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` inside exchange nothing: ``synchronize()`` has."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of so many backward passes before each exchange."""
        self._passes = passes
        self._left = [passes] * len(self._parameters)
        if (optimizer := self._owner()) is not None:
            vars(optimizer)["backward_passes_per_step"] = passes

    @untraced
    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """Clear the gradients; arguments are those of the optimizer's own method.

        Raises:
            AssertionError: between ``backward()`` and the exchange.
        """
        if self.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. Where the loss is "
                "another model's (a GAN's generator, whose loss passes through the discriminator), keep gradients off "
                "these parameters: loss.backward(inputs=list(generator.parameters()))"
            )
        if (optimizer := self._owner()) is not None:
            type(optimizer).zero_grad(optimizer, *args, **kwargs)

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: one is over, or a state was loaded into the optimizer."""
        self._exchanged = {}
        if (optimizer := self._owner()) is not None:
            self._passes = vars(optimizer)["backward_passes_per_step"]  # which scripts set
        self._left = [self._passes] * len(self._parameters)  # passes until a gradient is handed over
        self.begun = self.averaged = False

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""
        self.begin_anew()
        self._skipping = False

    def hand_over(self, index: int, p: torch.Tensor) -> None:
        """Begin the exchange of a gradient, and remember it in ``_exchanged``."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether the results are still those of the latest exchange."""
        return True

    def deliver(self) -> None:
        """Wait for the results of all gradients, and put them into ``.grad``."""
        raise NotImplementedError

    def fail(self, error: DGCError, index: int | None = None) -> NoReturn:
        """Raise an error about a gradient."""
        raise error

    @untraced
    def arrived(self, index: int, p: torch.Tensor) -> None:
        """A backward pass has added to a gradient."""
        if self._replaced or self._owner() is None:
            return
        if self._is_first:
            self._is_first = False
            self._guard()
        if self._left[index] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.begun, self.averaged = True, False
        self._left[index] -= 1
        if self._left[index] == 0:
            self.hand_over(index, p)

    def _guard(self) -> None:
        """Refuse the forward pass of a DistributedDataParallel over these parameters; it may be there and unused."""
        for ddp in ddp_over(self._parameters):
            if id(ddp) not in self._guarded:
                self._guarded[id(ddp)] = ddp.register_forward_pre_hook(weakly(self._refuse_ddp))

    def unguard(self) -> None:
        """Let a DistributedDataParallel over these parameters alone again."""
        while self._guarded:
            self._guarded.popitem()[1].remove()

    def _refuse_ddp(self, ddp: Any, inputs: object) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync and self._owner() is not None:
            self.fail(ConfigError(_IN_DDP))

    def first_exchanging(self) -> int | None:
        """The index of a gradient that must not change now."""
        return next(iter(self._exchanged), None)

    def require_unchanged(self) -> None:
        """Before the results are waited for: refuse gradients that were touched since their exchange began."""
        first, optimizer = self.first_exchanging(), self._owner()
        # The scaler divides gradients without a new version.
        if self._scaler and first is not None and optimizer and has_unscaled(self._scaler, optimizer):
            self.fail_changed(first)
        for index, p in enumerate(self._parameters):
            gradient, before = p.grad, self._exchanged[index]
            if gradient is None:
                name = self._names[index]
                self.fail(LayoutError(f"the gradient of {name!r} was cleared while it was exchanged"), index)
            changed = is_changed(p, before.gradient, before.version)
            if before.values is not None:
                now = scattered_values(gradient)
                changed |= not torch.allclose(now, before.values, rtol=0.0, atol=0.0, equal_nan=True)
            if changed:
                self.fail_changed(index)

    def fail_changed(self, index: int) -> NoReturn:
        """Raise the error about a gradient that was changed while it was exchanged."""
        if ddp_over(self._parameters):  # built after the optimizer was wrapped, or after the first step
            self.fail(ConfigError(_IN_DDP), index)
        self.fail(LayoutError(CHANGED.format(self._names[index])), index)


def refuse_copy(protocol: SupportsIndex) -> NoReturn:
    """Neither ``copy`` nor ``pickle``; both look this up on the instance."""
    raise TypeError(
        "a DistributedOptimizer cannot be copied or pickled: the copy's gradients would not be averaged. Build a new "
        "optimizer, wrap it, and hand it this one's state with load_state_dict(optimizer.state_dict())"
    )
