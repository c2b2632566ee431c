"""Horovod's methods on a user's optimizer, compressed or dense: ``synchronize``, ``skip_synchronize``, ``zero_grad``.

Backward passes are counted for each parameter. After the last one its gradient is handed over, and must not change
until the results are there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.distributed import ddp_over
from dgc.torch.front_end import CHANGED
from dgc.torch.scaler import has_unscaled
from dgc.torch.tensors import is_sharded, scattered_values
from dgc.torch.untraced import untraced, weakly

_IN_DDP = (
    "the model is trained in DistributedDataParallel, which averages gradients itself: leave the optimizer plain and "
    "call dgc.ddp.register(model, optimizer, compression), or leave DistributedDataParallel out"
)

# Wrapping another optimizer over the same parameters ends theirs.
_all: weakref.WeakSet[OptimizerMethods] = weakref.WeakSet()


class HandedOver(NamedTuple):
    """A gradient that is being exchanged: the tensor, its version at the start, and the tensor for the result.

    It must not change: the exchange may have read it before a change, or after it.
    """

    gradient: torch.Tensor
    version: int
    result: torch.Tensor
    values: torch.Tensor | None  # a few values of a sharded gradient, whose version does not always rise

    def is_changed(self, p: torch.Tensor) -> bool:
        """Return whether the parameter's gradient was replaced, or changed in place since then."""
        if p.grad is not self.gradient or is_newer(self.gradient, self.version):
            return True
        if self.values is None:
            return False
        now = scattered_values(p.grad)
        return not torch.allclose(now, self.values, rtol=0.0, atol=0.0, equal_nan=True)


def is_newer(gradient: torch.Tensor, version: int) -> bool:
    """Return whether a gradient was changed in place since it had this version."""
    if gradient._version == version:
        return False
    return gradient.is_sparse or gradient.untyped_storage().nbytes() <= gradient.nbytes  # parts of a buffer share one


class OptimizerMethods:
    """One optimizer's methods; a subclass hands over its gradients and delivers the results.

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
        self._handed: dict[int, HandedOver] = {}  # by index
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

    # -- a subclass has its own --------------------------------------------------------------------------------------

    def hand_over(self, index: int, p: torch.Tensor) -> None:
        """Begin the exchange of a gradient, and remember it in ``_handed``."""
        raise NotImplementedError

    def deliver(self) -> None:
        """Wait for the results of all gradients, and put them into ``.grad``."""
        raise NotImplementedError

    def step_begins(self, index: int | None) -> None:
        """Look at the gradients before the first one of a step is used: of this parameter, or None: of no new pass."""

    def results_are_there(self) -> bool:
        """Return whether the results of the latest exchange can be handed back once more."""
        return True

    def fail(self, error: DGCError, index: int | None = None) -> NoReturn:
        """Raise an error about a gradient."""
        raise error

    # -- Horovod's methods -------------------------------------------------------------------------------------------

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
        if self.averaged and self.results_are_there():
            return
        self.averaged = False
        if not self.begun:
            self.step_begins(None)
        for i, p in enumerate(self._parameters):
            if i not in self._handed:
                self.hand_over(i, p)
        self._require_unchanged()
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

    # -- backward passes ---------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: one is over, or a state was loaded into the optimizer."""
        self._handed = {}
        if (optimizer := self._owner()) is not None:
            self._passes = vars(optimizer)["backward_passes_per_step"]  # scripts set it
        self._left = [self._passes] * len(self._parameters)  # passes until a gradient is handed over
        self.begun = self.averaged = False

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""
        self.begin_anew()
        self._skipping = False

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
        if not self.begun:
            self.begun, self.averaged = True, False
            self.step_begins(index)
        self._left[index] -= 1
        if self._left[index] == 0:
            self.hand_over(index, p)

    def _guard(self) -> None:
        """Refuse the forward pass of a DistributedDataParallel over these parameters; it may be there and unused."""
        for ddp in ddp_over(self._parameters):
            if id(ddp) not in self._guarded:
                self._guarded[id(ddp)] = ddp.register_forward_pre_hook(weakly(self._refuse_ddp))

    def unguard(self) -> None:
        """Allow the forward pass of a DistributedDataParallel over these parameters again."""
        while self._guarded:
            self._guarded.popitem()[1].remove()

    def _refuse_ddp(self, ddp: Any, inputs: object) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync and self._owner() is not None:
            self.fail(ConfigError(_IN_DDP))

    def first_handed_over(self) -> int | None:
        """Return the index of a gradient that must not change now, if there is one."""
        return next(iter(self._handed), None)

    def _require_unchanged(self) -> None:
        first, optimizer = self.first_handed_over(), self._owner()
        # The scaler divides gradients without a new version.
        if self._scaler and first is not None and optimizer and has_unscaled(self._scaler, optimizer):
            self.fail_changed(first)
        for index, p in enumerate(self._parameters):
            if p.grad is None:
                name = self._names[index]
                self.fail(LayoutError(f"the gradient of {name!r} was cleared while it was exchanged"), index)
            if self._handed[index].is_changed(p):
                self.fail_changed(index)

    def fail_changed(self, index: int) -> NoReturn:
        """Raise the error about a gradient that was changed while it was exchanged."""
        if ddp_over(self._parameters):  # built after the optimizer was wrapped, or after the first step
            self.fail(ConfigError(_IN_DDP), index)
        self.fail(LayoutError(CHANGED.format(self._names[index])), index)


def refuse_copy(protocol: SupportsIndex) -> NoReturn:
    """Refuse ``copy`` and ``pickle``; both look this up on the instance."""
    raise TypeError(
        "a DistributedOptimizer cannot be copied or pickled: the copy's gradients would not be averaged. Build a new "
        "optimizer, wrap it, and hand it this one's state with load_state_dict(optimizer.state_dict())"
    )
