"""``dgc.torch.DistributedOptimizer``: the user's optimizer, whose gradients are compressed and averaged.

A hook on each parameter hands its gradient over as soon as the backward pass has computed it. A hook before the
optimizer's ``step()`` waits for the results, which are in ``.grad`` then. The optimizer stays the object that it was.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from dgc.adapter.compression import (
    check_compression,
    check_passes,
    check_predivide,
    refuse_adasum,
    refuse_grouping,
)
from dgc.errors import ConfigError, LayoutError
from dgc.torch.compressor import DGCCompressor, check_optimizer, named_pairs
from dgc.torch.distributed import ddp_over, horovod_of_all_ranks, job_of
from dgc.torch.engine import Engine
from dgc.torch.horovod import HOROVOD
from dgc.torch.step import CHANGED, StepWatch, has_unscaled, only_makes_state
from dgc.torch.tensors import is_sharded, local, scattered_values, set_memory
from dgc.torch.untraced import untraced, weakly


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: object = None,
    backward_passes_per_step: int = 1,
    op: object = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    group: Any = None,
) -> torch.optim.Optimizer:
    """Let an optimizer average its gradients, compressed, while the backward pass goes on.

    Arguments are those of ``horovod.torch.DistributedOptimizer``, and ``group``: a ``torch.distributed`` process group
    whose ranks exchange. Without it, these are Horovod's where ``hvd.init()`` was called, else all of
    ``torch.distributed``, for which neither Horovod nor MPI is needed.

    With ``compression=dgc.Compression.dgc(...)`` the compressor is bound to the optimizer's parameters here
    (collective); any other compression is handed to Horovod as it is.

    Returns:
        The optimizer itself, with Horovod's ``synchronize()``, ``skip_synchronize()``, ``zero_grad()`` and
        ``set_backward_passes_per_step()``, and the compressor as its attribute ``compression``.

    Raises:
        ConfigError: arguments that do not fit together, a compressor that is in use, or no plain optimizer.
        LayoutError: ranks disagree about the parameters.
    """
    check_compression(compression, DGCCompressor, "dgc.torch")
    check_optimizer(optimizer, named_parameters)
    check_passes(backward_passes_per_step)
    job = job_of(group)
    if not isinstance(compression, DGCCompressor):
        hvd = horovod_of_all_ranks(job, process_set)
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters=named_parameters,
            compression=compression or hvd.Compression.none,
            backward_passes_per_step=backward_passes_per_step,
            op=hvd.Average if op is None else HOROVOD.reduce_op(op),
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=hvd.global_process_set if process_set is None else process_set,
        )
    if job is HOROVOD:
        HOROVOD.module()
        refuse_adasum(op, HOROVOD)
    else:
        compression.use_job(job)
    refuse_grouping(num_groups, groups)
    op = compression.op_of(op)
    check_predivide(gradient_predivide_factor, op)
    compression.use_op(op)
    members = compression.process_set(process_set)
    named = named_pairs(optimizer, named_parameters)
    compression.bind(named, optimizer, members)
    attributes: dict[str, object] = {
        "compression": compression,
        "op": op,
        "process_set": members,
        "sparse_as_dense": sparse_as_dense,
        "gradient_predivide_factor": gradient_predivide_factor,
        "backward_passes_per_step": backward_passes_per_step,
        "__reduce_ex__": _refuse_copy,
    }
    vars(optimizer).update(attributes)
    vars(optimizer).update(_methods(optimizer, compression, sparse_as_dense))
    return optimizer


def _methods(optimizer: torch.optim.Optimizer, compression: DGCCompressor, sparse_as_dense: bool) -> dict[str, object]:
    """Horovod's methods, by name."""
    if (engine := compression.engine) is None:  # one process
        itself = weakref.proxy(optimizer)
        return {
            "synchronize": lambda: None,
            "skip_synchronize": contextlib.nullcontext,
            "set_backward_passes_per_step": lambda passes: setattr(itself, "backward_passes_per_step", passes),
        }
    steps = Steps(optimizer, engine, sparse_as_dense, compression.given_options.get("loss_scale"))
    names = ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad")
    return {name: getattr(steps, name) for name in names}


_IN_DDP = (
    "the model is trained in DistributedDataParallel, which averages gradients itself: leave the optimizer plain and "
    "call dgc.ddp.register(model, optimizer, compression), or leave DistributedDataParallel out"
)

_all_steps: weakref.WeakSet[Steps] = weakref.WeakSet()
"""Wrapping another optimizer over the same parameters ends theirs."""


class _Exchanged(NamedTuple):
    """A gradient whose exchange has begun, in which it must not change, its version then, and where its result goes.

    Whether the exchange has read a gradient before or after a change of it is a matter of chance.
    """

    gradient: torch.Tensor
    version: int
    result: torch.Tensor
    values: torch.Tensor | None  # a few, of a sharded one, whose version does not always rise


class Steps(StepWatch):
    """Hands one optimizer's gradients to the engine, and its results back before each step."""

    drives = holds = True
    begun = averaged = in_step = False
    _skipping = _updating = _replaced = False
    _is_first = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, sparse_as_dense: bool, scaler: object = None
    ) -> None:
        """Register hooks on the engine's parameters.

        Args:
            optimizer: that owns them, and keeps this object alive; its ``backward_passes_per_step`` is read.
            engine: of its compressor.
            sparse_as_dense: exchange sparse gradients as dense ones.
            scaler: the compressor's ``loss_scale``, a GradScaler perhaps.
        """
        super().__init__(engine)
        self._engine, self._scaler = engine, scaler
        self._dense = range(len(engine.parameters)) if sparse_as_dense else engine.excluded
        self._parameters = engine.parameters
        self._exchanged: dict[int, _Exchanged] = {}  # by index
        self._guarded: dict[int, Any] = {}  # by id of a DistributedDataParallel: its hook
        self._guard()
        self._passes = 1
        self._left = [1] * len(self._parameters)  # passes until a gradient is handed over
        self.drive(optimizer, self._arrived)
        self.begin_anew()
        for other in list(_all_steps):  # somebody may still refer to those optimizers
            if not other._ids.isdisjoint(self._ids):
                other.give_up()
                other._replaced = True
                other._unguard()
        _all_steps.add(self)

    # -- Horovod's methods -----------------------------------------------------------------------------------------

    @untraced
    def synchronize(self) -> None:
        """Exchange the gradients and wait for the results, which are in ``.grad`` then; again, it does nothing.

        Raises:
            ConfigError: another optimizer over these parameters was wrapped since.
            LayoutError: a gradient was changed, replaced or cleared while it was exchanged.
            DGCError: this or another rank failed.
        """
        engine, optimizer = self._engine, self.owner
        if self._replaced:
            raise ConfigError(
                "another optimizer with parameters of this one was wrapped since: step that one, and drop this one"
            )
        if self.averaged and engine.is_done():
            for i, p in enumerate(self._parameters):
                if p.grad is None and i not in engine.left_alone:
                    p.grad = torch.zeros_like(p)  # taken out of the step by hand
            return
        self.averaged = False
        for i, p in enumerate(self._parameters):
            if i not in self._exchanged:
                self._hand_over(i, p)
        self._require_unchanged(optimizer)
        engine.finish()
        for i, exchanged in self._exchanged.items():
            if i in engine.left_alone:
                self._parameters[i].grad = None
            elif exchanged.result is not self._parameters[i].grad:
                _deliver(self._parameters[i], exchanged.result)
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
        self._left = [passes] * len(self._left)
        if (optimizer := self.owner) is not None:
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
        if (optimizer := self.owner) is not None:
            type(optimizer).zero_grad(optimizer, *args, **kwargs)
        self._engine.results.cleared()

    # -- the watch's half ------------------------------------------------------------------------------------------

    def before_update(self, closure: bool) -> None:
        """Exchange before the optimizer's own update; what a closure computes is exchanged when it returns."""
        optimizer = self.owner
        assert optimizer is not None, "it steps"
        exchanging = next(iter(self._exchanged), None)  # the index of a gradient that must not change now
        if self._skipping:
            if exchanging is not None:
                wrong = "step() inside optimizer.skip_synchronize(): call optimizer.synchronize() first"
                self._engine.fail(LayoutError(wrong))
            return
        if not self.begun and not closure and only_makes_state(optimizer, self._parameters):
            self.saved.made_state()
            return
        if not self.begun and closure:
            return
        if exchanging is not None and self.by_scaler:
            # Its own step() has divided gradients by its scale, with no new version, where unscale_() has not.
            self._fail_changed(exchanging)
        if self.averaged and not self._updating:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Put step() into it: the gradients are averaged already",
                stacklevel=6,
            )
        synchronize = vars(optimizer)["synchronize"]
        self.in_step = synchronize == self.synchronize and not closure
        try:
            synchronize()
        finally:
            self.in_step = False
        self._updating = True  # a class of the user's that calls super().step() comes here twice

    def closure_returned(self) -> None:
        """Exchange what the closure of a step has computed, unless it has called ``synchronize()``."""
        if self.begun:
            self.synchronize()

    def updated(self) -> None:
        """The results of the exchange are used up."""
        self.averaged = self._updating = False

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""
        self.begin_anew()
        self._skipping = False

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: one is over, or a state was loaded into the optimizer."""
        self._exchanged = {}
        if (optimizer := self.owner) is not None:
            self._passes = vars(optimizer)["backward_passes_per_step"]  # which scripts set
        self._left = [self._passes] * len(self._left)
        self.begun = self.averaged = self._updating = False

    def end(self) -> None:
        """Watch no longer."""
        super().end()
        self._unguard()

    # -- inside --------------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """Refuse the forward pass of a DistributedDataParallel over these parameters; it may be there and unused."""
        for ddp in ddp_over(self._parameters):
            if id(ddp) not in self._guarded:
                self._guarded[id(ddp)] = ddp.register_forward_pre_hook(weakly(self._refuse_ddp))

    def _unguard(self) -> None:
        while self._guarded:
            self._guarded.popitem()[1].remove()

    def _refuse_ddp(self, ddp: Any, inputs: object) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync and self.owner is not None:
            self._engine.fail(ConfigError(_IN_DDP))

    @untraced
    def _arrived(self, index: int, p: torch.Tensor) -> None:
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
            self._hand_over(index, p)

    def _hand_over(self, index: int, p: torch.Tensor) -> None:
        if absent := p.grad is None:
            p.grad = torch.zeros_like(p)  # frozen or unused on this rank in this step; the others may have used it
        gradient = p.grad
        if gradient.is_sparse and index in self._dense:
            gradient = gradient.to_dense()
        result = self._engine.submit(index, gradient, absent=absent)
        values = scattered_values(p.grad) if is_sharded(p.grad) else None
        self._exchanged[index] = _Exchanged(p.grad, p.grad._version, result, values)

    def _require_unchanged(self, optimizer: torch.optim.Optimizer | None) -> None:
        first = next(iter(self._exchanged), None)
        # The scaler divides gradients without a new version.
        if self._scaler and first is not None and optimizer and has_unscaled(self._scaler, optimizer):
            self._fail_changed(first)
        for index, p in enumerate(self._parameters):
            gradient, before = p.grad, self._exchanged[index]
            if gradient is None:
                name = self._engine.names[index]
                self._engine.fail(LayoutError(f"the gradient of {name!r} was cleared while it was exchanged"), index)
            changed = gradient._version != before.version
            if changed and not gradient.is_sparse:  # parts of a buffer have one version
                changed = gradient.untyped_storage().nbytes() <= gradient.nbytes
            if before.values is not None:
                now = scattered_values(gradient)
                changed |= not torch.allclose(now, before.values, rtol=0.0, atol=0.0, equal_nan=True)
            if changed or gradient is not before.gradient:
                self._fail_changed(index)

    def _fail_changed(self, index: int) -> NoReturn:
        if ddp_over(self._parameters):  # built after the optimizer was wrapped, or after the first step
            self._engine.fail(ConfigError(_IN_DDP), index)
        self._engine.fail(LayoutError(CHANGED.format(self._engine.names[index])), index)


def _refuse_copy(protocol: SupportsIndex) -> NoReturn:
    """Neither ``copy`` nor ``pickle``; both look this up on the instance."""
    raise TypeError(
        "a DistributedOptimizer cannot be copied or pickled: the copy's gradients would not be averaged. Build a new "
        "optimizer, wrap it, and hand it this one's state with load_state_dict(optimizer.state_dict())"
    )


def _deliver(p: torch.Tensor, result: torch.Tensor) -> None:
    """Let ``.grad`` hold a result that lies elsewhere."""
    if p.grad is None:
        return
    gradient = local(p.grad)
    if gradient.is_sparse:
        gradient.zero_().add_(result.to_sparse())
    else:
        set_memory(gradient, result)
