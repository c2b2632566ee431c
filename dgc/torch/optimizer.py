"""``dgc.torch.DistributedOptimizer``: the user's optimizer, whose gradients are compressed and averaged.

A hook on each parameter hands its gradient over as soon as the backward pass has computed it. A hook before the
optimizer's ``step()`` waits for the results, which are in ``.grad`` then. The optimizer stays the object that it was.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from dgc.adapter.compression import (
    check_compression,
    check_passes,
    check_predivide,
    refuse_adasum,
    refuse_grouping,
)
from dgc.adapter.compressor import CompressorBase
from dgc.errors import ConfigError, LayoutError
from dgc.torch.compressor import DGCCompressor, named_pairs
from dgc.torch.engine.engine import Engine
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.torch.engine.step.scaler import steps_by_scaler
from dgc.torch.engine.step.untraced import untraced
from dgc.torch.engine.step.watch import require_free


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
        ``set_backward_passes_per_step()``, the compressor as its attribute ``compression`` and that one's
        ``discard_step()``.

    Raises:
        ConfigError: arguments that do not fit together, a compressor that is in use, or no plain optimizer.
        LayoutError: ranks disagree about the parameters.
    """
    check_compression(compression, DGCCompressor, "dgc.torch")
    _check_optimizer(optimizer, named_parameters)
    check_passes(backward_passes_per_step)
    if not isinstance(compression, DGCCompressor):
        hvd = HOROVOD.module()
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
    if group is not None or _only_torch_distributed():
        compression.use_group(group)
    else:
        HOROVOD.module()
        refuse_adasum(op, HOROVOD)
    refuse_grouping(num_groups, groups)
    op = compression.op_of(op)
    check_predivide(gradient_predivide_factor, op)
    compression.use_op(op)
    members = compression.process_set(process_set)
    named = named_pairs(optimizer, named_parameters)
    compression.bind(named, optimizer, members)
    steps = Steps(optimizer, compression.engine, backward_passes_per_step, sparse_as_dense)
    attributes: dict[str, object] = {
        "compression": compression,
        "discard_step": compression.discard_step,
        "op": op,
        "process_set": members,
        "sparse_as_dense": sparse_as_dense,
        "gradient_predivide_factor": gradient_predivide_factor,
        "backward_passes_per_step": backward_passes_per_step,
        "__reduce_ex__": _refuse_copy,
    }
    for name in ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad"):
        attributes[name] = getattr(steps, name)
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    return optimizer


_CHANGED = (
    "the gradient of {!r} was changed or replaced while it was exchanged, which begins in backward(): call "
    "optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize(); register a "
    "hook that changes gradients before the optimizer is wrapped"
)

_all_steps: weakref.WeakSet[Steps] = weakref.WeakSet()
"""Those of optimizers that still live: wrapping another over the same parameters ends theirs."""


class _Exchanged(NamedTuple):
    """A gradient whose exchange has begun, in which nobody may change it, its version then, and where its result goes.

    Whether the exchange has read a gradient before or after a change of it is a matter of chance.
    """

    gradient: torch.Tensor
    version: int
    result: torch.Tensor


class Steps:
    """Hands one optimizer's gradients to the engine, and its results back before each step.

    A :class:`~dgc.torch.engine.step.watch.Driver`. The optimizer keeps this object alive, not the other way round.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine | None, passes: int, sparse_as_dense: bool
    ) -> None:
        """Register hooks on the engine's parameters.

        Args:
            optimizer: that owns them.
            engine: of its compressor; None where this process exchanges nothing.
            passes: backward passes whose gradients are added up before an exchange.
            sparse_as_dense: exchange sparse gradients as dense ones.
        """
        self._optimizer: weakref.ref[Any] = weakref.ref(optimizer)  # whose attributes scripts set
        self._engine = engine
        self._sparse_as_dense = sparse_as_dense
        self._parameters = [] if engine is None else engine.parameters
        self._exchanged: dict[int, _Exchanged | None] = {}  # by index; None: sparse, and exchanged beside
        self._passes = passes
        self._left = [passes] * len(self._parameters)  # passes until a gradient is handed over
        self._synchronized = self._skipping = self._updating = self._replaced = False
        self.begun = self.in_step = False
        if engine is not None:
            # The public way to give a class's step() torch's hooks again, where a script has replaced it since.
            torch.optim.Optimizer.__setstate__(optimizer, {})
            engine.watch.own(optimizer, self)
            self._replace_others()
            itself = weakref.ref(self)
            hooks = [p.register_post_accumulate_grad_hook(_hook(itself, i)) for i, p in enumerate(self._parameters)]
            weakref.finalize(self, lambda: [hook.remove() for hook in hooks]).atexit = False

    # -- Horovod's methods -----------------------------------------------------------------------------------------

    @untraced
    def synchronize(self) -> None:
        """Exchange the gradients and wait for the results, which are in ``.grad`` then; again, it does nothing.

        Raises:
            ConfigError: another optimizer over these parameters was wrapped since.
            LayoutError: a gradient was changed, replaced or cleared while it was exchanged.
            DGCError: this or another rank failed.
        """
        if (engine := self._engine) is None:
            return
        if self._replaced:
            raise ConfigError(
                "another optimizer with parameters of this one was wrapped since: step that one, and drop this one"
            )
        if self.averaged and engine.is_done():
            for p in self._parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # taken out of the step by hand
            return
        self._synchronized = False
        for i, p in enumerate(self._parameters):
            if i not in self._exchanged:
                self._hand_over(i, p)
        for i, p in enumerate(self._parameters):
            self._require_unchanged(engine, i, p.grad)
        engine.finish()
        for i, exchanged in self._exchanged.items():
            if exchanged is not None:
                _deliver(self._parameters[i], exchanged.result)
        engine.sparse.join(engine.transport)
        self.begin_anew()
        self._synchronized = True

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
        if (optimizer := self._optimizer()) is not None:
            optimizer.backward_passes_per_step = passes

    @untraced
    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """Clear the gradients; arguments are those of the optimizer's own method.

        Raises:
            AssertionError: between ``backward()`` and the exchange.
        """
        if self.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        if (optimizer := self._optimizer()) is not None:
            type(optimizer).zero_grad(optimizer, *args, **kwargs)
        if self._engine is not None:
            self._engine.watch.results.cleared()

    # -- the engine's driver ---------------------------------------------------------------------------------------

    @property
    def averaged(self) -> bool:
        """Whether ``synchronize()`` has run, and no backward pass after it."""
        return self._synchronized and not self.begun

    @property
    def first_pass(self) -> bool:
        """Whether each gradient is handed over in the backward pass that computes it."""
        return self._passes == 1

    def before_update(self, closure: bool) -> None:
        """Exchange before the optimizer's own update; what a closure computes is exchanged when it returns."""
        optimizer, engine = self._optimizer(), self._engine
        assert optimizer is not None, "it steps"
        assert engine is not None, "its parameters are watched"
        exchanging = [i for i, exchanged in self._exchanged.items() if exchanged is not None]
        if self._skipping and exchanging:
            engine.fail(LayoutError("step() inside optimizer.skip_synchronize(): call optimizer.synchronize() first"))
        if self._skipping or (closure and not self.begun):
            return
        if exchanging and steps_by_scaler():
            # Its own step() has divided gradients by its scale, with no new version, where unscale_() has not.
            engine.fail(LayoutError(_CHANGED.format(engine.names[exchanging[0]])), exchanging[0])
        if self.averaged and not self._updating:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Put step() into it: the gradients are averaged already",
                stacklevel=6,
            )
        own = optimizer.synchronize == self.synchronize
        self.in_step = own and not closure
        try:
            optimizer.synchronize()
        finally:
            self.in_step = False
        self._updating = True  # a class of the user's that calls super().step() comes here twice

    def closure_returned(self) -> None:
        """Exchange what the closure of a step has computed, unless it has called ``synchronize()``."""
        if self.begun:
            self.synchronize()

    def updated(self) -> None:
        """The results of the exchange are used up."""
        self._synchronized = self._updating = False

    def give_up(self) -> None:
        """Forget the gradients of a step that an error ended; the next backward pass begins anew."""
        self.begin_anew()
        self._skipping = False

    def begin_anew(self) -> None:
        """Expect the first backward pass of a step: one is over, or a state was loaded into the optimizer."""
        self._exchanged = {}
        if (optimizer := self._optimizer()) is not None:
            self._passes = optimizer.backward_passes_per_step
        self._left = [self._passes] * len(self._left)
        self.begun = self._synchronized = self._updating = False

    # -- inside ----------------------------------------------------------------------------------------------------

    def _replace_others(self) -> None:
        """Take parameters over from optimizers that were wrapped before, as somebody may still refer to them."""
        own = {id(p) for p in self._parameters}
        for other in list(_all_steps):
            if any(id(p) in own for p in other._parameters):
                other.give_up()
                other._replaced = True
        _all_steps.add(self)

    def _arrived(self, index: int, p: torch.Tensor) -> None:
        """A backward pass has added to a gradient."""
        if self._replaced:
            return
        if self._left[index] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.begun = True
        self._left[index] -= 1
        if self._left[index] == 0:
            self._hand_over(index, p)

    def _hand_over(self, index: int, p: torch.Tensor) -> None:
        engine = self._engine
        assert engine is not None, "there are parameters"
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # unused on this rank in this step; the others may have used it
        gradient = p.grad
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                engine.require_own_momentum(index)
                self._exchanged[index] = None
                return
            gradient = gradient.to_dense()
        result = engine.submit(index, gradient)
        self._exchanged[index] = _Exchanged(p.grad, p.grad._version, result)

    def _require_unchanged(self, engine: Engine, index: int, gradient: torch.Tensor | None) -> None:
        name = engine.names[index]
        if gradient is None:
            engine.fail(LayoutError(f"the gradient of {name!r} was cleared while it was exchanged"), index)
        if (before := self._exchanged[index]) is None:
            return
        changed = gradient._version != before.version
        if changed and not gradient.is_sparse:  # parts of a buffer have one version
            changed = gradient.untyped_storage().nbytes() <= gradient.nbytes
        if changed or gradient is not before.gradient:
            engine.fail(LayoutError(_CHANGED.format(name)), index)


def _refuse_copy(protocol: SupportsIndex) -> NoReturn:
    """Neither ``copy`` nor ``pickle``; both look this up on the instance."""
    raise TypeError(
        "a DistributedOptimizer cannot be copied or pickled: the copy's gradients would not be averaged. Build a new "
        "optimizer, wrap it, and hand it this one's state with load_state_dict(optimizer.state_dict())"
    )


def _deliver(p: torch.Tensor, result: torch.Tensor) -> None:
    """Let ``.grad`` hold a result, which mostly lies there already."""
    gradient = p.grad
    if gradient is None or result is gradient:
        return
    if gradient.is_sparse:
        gradient.zero_().add_(result.to_sparse())
    else:
        gradient.set_(result)  # type: ignore[call-overload]


def _hook(steps: weakref.ref[Steps], index: int) -> Callable[[torch.Tensor], None]:
    """A parameter keeps its hooks, and must not keep a compressor alive that was dropped."""

    @untraced
    def arrived(p: torch.Tensor) -> None:
        if (itself := steps()) is not None:
            itself._arrived(index, p)

    return arrived


def _only_torch_distributed() -> bool:
    """Whether torch.distributed is initialised and Horovod is not."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    hvd = sys.modules.get("horovod.torch")
    return hvd is None or not hvd.is_initialized()


def _check_optimizer(optimizer: object, named_parameters: object) -> None:
    """What would be taken for something else, or wrapped twice.

    Raises:
        ConfigError: the message says what to pass.
    """
    if isinstance(named_parameters, CompressorBase):
        raise ConfigError("named_parameters is a compressor; pass it by its name: compression=...")
    if hasattr(optimizer, "skip_synchronize"):
        raise ConfigError("this optimizer is distributed already; wrap the plain optimizer once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer")
    require_free([p for group in optimizer.param_groups for p in group["params"]], of_all=False)
