"""The front end of dgc's ``DistributedOptimizer``: it submits gradients, and has Horovod's methods.

Backward passes are counted for each parameter. After the last one the gradient is submitted. The gradient must not
change until the results have come. ``step()``, or ``synchronize()`` before it, waits for them.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch
from typing_extensions import override

from dgc.errors import ConfigError, LayoutError
from dgc.torch.distributed import ddp_over
from dgc.torch.front_end import Closure, FrontEnd, Waiting, changed_gradient
from dgc.torch.scaler import has_unscaled, steps_by_scaler
from dgc.torch.tensors import is_sharded, local, scattered_values, set_memory
from dgc.torch.untraced import untraced, weakly

_IN_DDP = (
    "the model is trained in DistributedDataParallel, which averages gradients itself: leave the optimizer plain and "
    "call dgc.ddp.register(model, optimizer, compression), or leave DistributedDataParallel out"
)


class HandedOver(NamedTuple):
    """A gradient that is being exchanged: the tensor, its version at the start, and the tensor for the result.

    It must not change, because the exchange might read it before the change or after it.
    """

    gradient: torch.Tensor
    version: int
    result: torch.Tensor
    values: torch.Tensor | None  # a few values of a sharded gradient, because its version does not show every change

    def is_changed(self, p: torch.Tensor) -> bool:
        """Return whether the parameter's gradient was replaced, or its version shows a change since the start."""
        if p.grad is not self.gradient:
            return True
        return self.gradient._version != self.version and has_own_version(self.gradient)

    def has_same_values(self) -> torch.Tensor:
        """Return whether the values are the same, as a tensor on their device."""
        return torch.isclose(scattered_values(self.gradient), self.values, rtol=0.0, atol=0.0, equal_nan=True).all()


def has_own_version(gradient: torch.Tensor) -> bool:
    """Return whether a new version means that this gradient was changed. Parts of one buffer share a version."""
    return gradient.is_sparse or gradient.untyped_storage().nbytes() <= gradient.nbytes


class OptimizerFrontEnd(FrontEnd):
    """Submits one optimizer's gradients to an engine, and brings the results back before each step."""

    holds = True
    _skipping = False
    _is_first = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Any, densified: Collection[int], scaler: object = None
    ) -> None:
        """Register hooks on the parameters, and give the optimizer Horovod's methods, which keep this object alive.

        Args:
            optimizer: has an attribute ``backward_passes_per_step``. Optimizers that were wrapped earlier for some of
                its parameters exchange nothing any more.
            engine: exchanges the parameters' gradients.
            densified: indices of parameters whose sparse gradients are exchanged as dense ones.
            scaler: a GradScaler whose scale the engine knows, if there is one.
        """
        super().__init__(engine)
        self._parameters: list[torch.Tensor] = engine.parameters
        self._names: list[str] = engine.names
        self._densified, self._scaler = densified, scaler
        self._sharded = {i for i, p in enumerate(self._parameters) if is_sharded(p)}
        self._handed: dict[int, HandedOver] = {}  # by index
        self._guarded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # DDP models whose forward pass is refused
        self.drive(optimizer, self.arrived)
        self._guard()
        self.begin_anew()
        for other in self.others():  # their optimizers may still be in use
            if isinstance(other, OptimizerFrontEnd):
                other.begin_anew()
                other._replaced = True
        for name in ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad"):
            vars(optimizer)[name] = getattr(self, name)

    # -- Horovod's methods -------------------------------------------------------------------------------------------

    @untraced
    def synchronize(self) -> None:
        """Exchange the gradients, and wait until the results are in ``.grad``. A second call does nothing.

        Raises:
            ConfigError: another optimizer for these parameters was wrapped later, or a gradient is sparse.
            LayoutError: a gradient was changed, replaced or cleared while it was exchanged.
            DGCError: this or another rank failed.
        """
        self._exchange(update_follows=False)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` exchange nothing inside the ``with`` block, because ``synchronize()`` has already done so."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of this number of backward passes before each exchange."""
        self._left = [passes] * len(self._parameters)
        if (optimizer := self.owner) is not None:
            vars(optimizer)["backward_passes_per_step"] = passes

    @untraced
    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """Clear the gradients; arguments are those of the optimizer's own method.

        Passes of an accumulation that has not reached ``backward_passes_per_step`` are dropped, as in dense training.

        Raises:
            AssertionError: after the last of these passes and before the exchange has ended.
        """
        if self._waiting is Waiting.GRADIENTS and not self._handed:
            self.begin_anew()  # an accumulation ends early, and no gradient of it is being exchanged
        if self._waiting is Waiting.GRADIENTS:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. Where the loss is "
                "another model's (a GAN's generator, whose loss passes through the discriminator), keep gradients off "
                "these parameters: loss.backward(inputs=list(generator.parameters()))"
            )
        if (optimizer := self.owner) is not None:
            type(optimizer).zero_grad(optimizer, *args, **kwargs)
        if self._waiting is Waiting.RESULTS and self.update is None:  # a closure may be called more than once
            self.engine.warn_of_dropped()
        self._waiting, self._sample = Waiting.NOTHING, None
        self.engine.results_cleared()

    # -- in backward(): collect --------------------------------------------------------------------------------------

    @untraced
    def arrived(self, index: int, p: torch.Tensor) -> None:
        """Note that a backward pass has added to a gradient."""
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
        if self._waiting is not Waiting.GRADIENTS:
            self._waiting = Waiting.GRADIENTS
            self.engine.refuse_results(index)
        self._left[index] -= 1
        if self._left[index] == 0:
            self._hand_over(index, p)

    def _hand_over(self, index: int, p: torch.Tensor) -> None:
        if absent := p.grad is None:
            p.grad = torch.zeros_like(p)  # p is frozen or unused here in this step; other ranks may have used it
        gradient = p.grad
        if gradient.is_sparse and index in self._densified:
            gradient = gradient.to_dense()
            if not self.engine.keeps_sparse:
                p.grad = gradient
        result = self.engine.submit(index, gradient, absent=absent)
        values = scattered_values(p.grad) if index in self._sharded else None
        self._handed[index] = HandedOver(p.grad, p.grad._version, result, values)

    # -- in step() or synchronize(): exchange, and bring back --------------------------------------------------------

    @override
    def end_exchange(self, optimizer: torch.optim.Optimizer) -> None:
        exchanging = next(iter(self._handed), None)
        if self._skipping:
            if exchanging is not None or self._waiting is Waiting.GRADIENTS:
                wrong = "step() inside optimizer.skip_synchronize(): call optimizer.synchronize() first"
                self.engine.fail(LayoutError(wrong))
            return
        if self._waiting is not Waiting.GRADIENTS and self.only_makes_state(optimizer):
            return
        if exchanging is not None and steps_by_scaler():
            # Unless unscale_() was called, the scaler's step() has divided the gradients by its scale, without changing
            # their version counters.
            self._fail_changed(exchanging)
        if self._waiting is Waiting.RESULTS:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Put step() into it: the gradients are averaged already",
                stacklevel=6,
            )
        if vars(optimizer)["synchronize"] == self.synchronize:
            self._exchange(update_follows=True)
        else:
            vars(optimizer)["synchronize"]()  # the script has replaced our method

    @override
    def end_exchange_of_closure(self) -> None:
        if self._waiting is not Waiting.RESULTS:  # the closure computed no gradient here; other ranks may have some
            self.synchronize()

    def _exchange(self, update_follows: bool) -> None:
        """Submit the gradients that no backward pass has submitted, wait for all results, put them into ``.grad``."""
        engine = self.engine
        if self._replaced:
            raise ConfigError(
                "another optimizer with parameters of this one was wrapped since: step that one, and drop this one"
            )
        if self._waiting is Waiting.RESULTS and engine.hands_back():
            return
        if self._waiting is not Waiting.GRADIENTS:
            self._waiting = Waiting.GRADIENTS  # without a backward pass: zeros, or gradients that the script has set
            engine.refuse_results()
        for i, p in enumerate(self._parameters):
            if i not in self._handed:
                self._hand_over(i, p)
        self._require_unchanged()
        self.update_follows = update_follows
        engine.finish()
        for i, handed in self._handed.items():
            p = self._parameters[i]
            if i in engine.left_alone:
                p.grad = None
            elif handed.result is not p.grad:
                _write_result(p, handed.result)
        self.begin_anew()
        self._waiting = Waiting.RESULTS
        if not update_follows:
            gradients = {i: p.grad for i, p in enumerate(self._parameters)}
            self.keep_sample({i: g for i, g in gradients.items() if g is not None and not g.is_sparse})

    def _require_unchanged(self) -> None:
        optimizer = self.owner
        # The scaler divides gradients without changing their version counters.
        if self._scaler and self._handed and optimizer and has_unscaled(self._scaler, optimizer):
            self._fail_changed(next(iter(self._handed)))
        for index, p in enumerate(self._parameters):
            if p.grad is None:
                name = self._names[index]
                self.engine.fail(LayoutError(f"the gradient of {name!r} was cleared while it was exchanged"), index)
            if self._handed[index].is_changed(p):
                self._fail_changed(index)
        same = {i: self._handed[i].has_same_values() for i in self._sharded}
        # Wait for the device once, not for each parameter.
        if same and not bool(torch.stack(list(same.values())).all()):
            self._fail_changed(next(i for i, each in same.items() if not each))

    def _fail_changed(self, index: int) -> None:
        in_ddp = ddp_over(self._parameters)  # DDP may be built after the wrapping, or even after the first step
        self.engine.fail(ConfigError(_IN_DDP) if in_ddp else changed_gradient(self.engine, index), index)

    # -- between two steps -------------------------------------------------------------------------------------------

    @override
    def begin_anew(self) -> None:
        self._handed = {}
        passes = 1 if (optimizer := self.owner) is None else vars(optimizer)["backward_passes_per_step"]
        self._left = [passes] * len(self._parameters)  # passes until a gradient is submitted
        self._waiting = Waiting.NOTHING

    @override
    def end(self) -> None:
        super().end()
        self.begin_anew()
        self.follow_steps()

    @override
    def before_step(
        self, optimizer: torch.optim.Optimizer, closure: Closure | None, names_closure: bool
    ) -> Closure | None:
        if self.drives:
            return super().before_step(optimizer, closure, names_closure)
        if self.owns(optimizer) and vars(optimizer).get("synchronize") == self.synchronize:
            raise ConfigError(  # after unwrap() the methods are gone, and there is no error
                "the compressor of this optimizer was closed, and its gradients are not averaged any more: build a "
                "new optimizer"
            )
        return closure

    # -- DistributedDataParallel over the same parameters ------------------------------------------------------------

    def _guard(self) -> None:
        """Refuse the forward pass of a DistributedDataParallel over these parameters. Building one is allowed."""
        for ddp in ddp_over(self._parameters):
            if ddp not in self._guarded:
                self._guarded.add(ddp)
                ddp.register_forward_pre_hook(weakly(self._refuse_ddp))

    def _refuse_ddp(self, ddp: Any, inputs: object) -> None:
        exchanges = self.drives and not self._replaced and self.owner is not None
        if exchanges and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self.engine.fail(ConfigError(_IN_DDP))


def _write_result(p: torch.Tensor, result: torch.Tensor) -> None:
    """Put a result that is in other memory into ``.grad``."""
    if p.grad is None:
        return
    gradient = local(p.grad)
    if gradient.is_sparse:
        gradient.zero_().add_(result.to_sparse())
    else:
        set_memory(gradient, result)


def refuse_copy(protocol: SupportsIndex) -> NoReturn:
    """Refuse ``copy`` and ``pickle``, which both look up this method on the instance."""
    raise TypeError(
        "a DistributedOptimizer cannot be copied or pickled: the copy's gradients would not be averaged. Build a new "
        "optimizer, wrap it, and hand it this one's state with load_state_dict(optimizer.state_dict())"
    )
