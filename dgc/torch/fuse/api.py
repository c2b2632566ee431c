"""The three public functions: fuse an optimizer, step it, ask whether it is fused."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from dgc.torch.engine.step.untraced import untraced
from dgc.torch.fuse.seam import resolve
from dgc.torch.fuse.step import FuseOptions, FuseRecord

_RECORD = "_dgc_fuse"


def fuse_optimizer(
    optimizer: Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    elementwise: bool | None = None,
) -> Optimizer:
    """Let ``optimizer`` update many parameters as one, by ``fuse_step``; its ``step`` and results stay as they are.

    Parameters of a group with the same type and device are moved next to each other (``param.data`` is re-pointed, the
    Parameter objects stay). ``fuse_step`` then shows the optimizer one 1-D parameter instead of many. Frozen,
    0-dimensional, shared-memory and pinned parameters, and views of somebody else's buffer, stay where they are.

    Call it last: after ``model.to(...)`` and after wrapping in a DistributedOptimizer.

    A copy of a fused optimizer (``copy.deepcopy``, ``torch.load``, pickle) is fused too, with the same arguments; its
    own parameters are flattened at its first ``fuse_step``. An optimizer that wraps this one is not fused.

    Args:
        optimizer: any torch optimizer, Horovod's DistributedOptimizer included. One that is not known to work element
            by element (LBFGS, Adafactor, and every class that is not torch's) gets a warning and is stepped plainly.
        do_flatten: move weights into flat memory now, and gradients when ``fuse_step`` needs them. If False neither is
            ever moved, and only what lies side by side already is fused.
        check_flatten: warn when parameters have left their flat memory. Only with ``do_flatten``.
        elementwise: None: torch's own element-wise classes are fused, and subclasses that do not override ``step``.
            True: the class of ``optimizer`` is one too. The new value of an element may depend on that element's
            value, gradient and state, on the options of its group, on the loss, and on state that is the same for
            all elements of a parameter (a step count); on no norm or mean, and on no shape, size, name, attribute or
            place of the parameter. Its state is in ``state``, its closure is called once and first.
            False: step plainly, without a warning.

    Returns:
        The same object, with a method ``fuse_step(closure=None)``.

    Raises:
        RuntimeError: it is fused already.
        TypeError: not a torch optimizer.
        ConfigError: Horovod's optimizer with ``op=Adasum``; or ``elementwise=True`` of a class known not to be.

    Source: Bagua, ``bagua.torch_api.contrib.fuse.optimizer``.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if is_fused_optimizer(optimizer):
        raise RuntimeError("this optimizer is fused already; call fuse_optimizer once")
    seam = resolve(optimizer)
    record = FuseRecord(FuseOptions(do_flatten, check_flatten, elementwise))
    if record.can_fuse(seam):
        with torch.no_grad():
            record.flatten(seam)
    _install(optimizer, record)
    return optimizer


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Whether ``fuse_optimizer`` was applied to this object, or to the one it is a copy of."""
    return isinstance(getattr(optimizer, _RECORD, None), FuseRecord)


@untraced
def fuse_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Step ``optimizer`` with few kernel calls; afterwards parameters and state are as ``step(closure)`` leaves them.

    May be mixed with ``step`` freely. Where others call ``step`` (a GradScaler, a trainer), let them call this one:
    ``optimizer.step = optimizer.fuse_step``.

    Step hooks run once, with the optimizer's real groups. With a DistributedOptimizer the closure runs first, then the
    gradients are averaged (unless inside ``skip_synchronize()``), then the step hooks run, then the local update.

    Args:
        optimizer: a fused optimizer.
        closure: clears the gradients, recomputes them and returns the loss. Called once, before the update, with
            gradients enabled; an optimizer that asks for the loss gets it.

    Returns:
        What ``step(closure)`` returns: of torch's optimizers the loss, or None without a closure.

    Raises:
        AssertionError: the optimizer is not fused.
        RuntimeError: the optimizer calls its closure several times, or after it changed parameters. ``step(closure)``
            can do that.
    """
    record = getattr(optimizer, _RECORD, None)
    if not isinstance(record, FuseRecord):
        raise AssertionError(
            "fuse_step needs a fused optimizer: call fuse_optimizer(optimizer) first. An optimizer that wraps a fused "
            "one, such as a DistributedOptimizer, must be fused itself."
        )
    seam = resolve(optimizer)
    arguments = () if closure is None else (closure,)
    # Learning rate schedulers ask whether step() was called before them.
    vars(optimizer)["_opt_called"] = True
    if not record.can_fuse(seam):
        record.fused_sets = record.fused_params = 0
        # Not optimizer.step: that may be fuse_step itself, set by the user.
        return type(optimizer).step(optimizer, *arguments)

    def update(_local: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        closure = _evaluated(closure)
        with torch.no_grad():
            return record.update(seam, closure)

    local_step = Optimizer.profile_hook_step(update)
    around = seam.around
    if around is None:
        return local_step(seam.local, *arguments)

    def distributed_step(_optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        evaluated: list[Callable[[], Any]] = []

        def compute() -> None:
            if (loss := _evaluated(closure)) is not None:
                evaluated.append(loss)

        with around(compute):
            return local_step(seam.local, *evaluated)

    if seam.local is not optimizer:  # the outer optimizer has hooks of its own
        distributed_step = Optimizer.profile_hook_step(distributed_step)
    return distributed_step(optimizer, *arguments)


def _evaluated(closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Evaluate ``closure`` now, with gradients enabled as torch does; the result returns the loss it had."""
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


class _FuseStepMethod:
    """``optimizer.fuse_step``, on the instance alone: other optimizers of the class are not affected.

    Weak, so that the optimizer and its parameters are freed as soon as the user drops them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        functools.update_wrapper(self, fuse_step, updated=())
        # As a bound method has it; schedulers use it when this takes the place of optimizer.step.
        self.__func__ = fuse_step

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer of this fuse_step no longer exists")
        return fuse_step(optimizer, closure)


class _Reduce:
    """``optimizer.__reduce_ex__``, on the instance: torch's pickling keeps groups and state and forgets the rest.

    ``copy`` and ``pickle`` look this method up on the instance. Should they stop to, a copy would be a plain optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, protocol: int) -> Any:
        optimizer = self._optimizer()
        cls: Any = type(optimizer)
        made, args, *rest = cls.__reduce_ex__(optimizer, protocol)
        if getattr(made, "__name__", None) != "__newobj__" or len(args) != 1:  # the class has a way of its own
            return made, args, *rest
        record = getattr(optimizer, _RECORD)
        return _restore, (args[0], record.options), *rest


def _restore(cls: Any, options: FuseOptions) -> Optimizer:
    optimizer = cls.__new__(cls)
    _install(optimizer, FuseRecord(options))
    return optimizer


def _install(optimizer: Any, record: FuseRecord) -> None:
    setattr(optimizer, _RECORD, record)
    optimizer.fuse_step = _FuseStepMethod(optimizer)
    if "__reduce_ex__" not in vars(optimizer):  # a distributed optimizer is not copied
        optimizer.__reduce_ex__ = _Reduce(optimizer)
