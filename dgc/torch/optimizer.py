"""Way B: Horovod's ``DistributedOptimizer`` with the compressor driven directly, without stand-in tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

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
from dgc.torch.compressor import DGCCompressor
from dgc.torch.engine.engine import Engine
from dgc.torch.engine.horovod.horovod import HOROVOD, is_averaged
from dgc.torch.engine.step.untraced import leave_hooks_untraced, untraced


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that gradients travel compressed while the backward pass goes on.

    Arguments are those of ``horovod.torch.DistributedOptimizer``. With ``compression=dgc.Compression.dgc(...)`` the
    compressor is bound to the optimizer's parameters here (collective); any other compression is handed to Horovod
    as it is.

    Returns:
        An optimizer of the given one's class, with Horovod's ``synchronize()`` and ``skip_synchronize()``, and with
        the compressor as its attribute ``compression`` and that one's ``discard_step()``.

    Raises:
        ConfigError: arguments that do not fit together, a compressor that is in use, or no plain optimizer.
        LayoutError: ranks disagree about the parameters.
    """
    hvd = HOROVOD.module()
    check_compression(compression, DGCCompressor, "dgc.torch")
    _check_optimizer(optimizer, named_parameters)
    check_passes(backward_passes_per_step)
    ours = compression if isinstance(compression, DGCCompressor) else None
    if ours is not None:
        refuse_adasum(op, HOROVOD)
        refuse_grouping(num_groups, groups)
        op = ours.op_of(op)
        check_predivide(gradient_predivide_factor, op)
        ours.use_op(op)
        members = ours.process_set(process_set)
    else:
        members = hvd.global_process_set if process_set is None else process_set
    op = hvd.Average if op is None else HOROVOD.reduce_op(op)
    arguments = dict(
        named_parameters=named_parameters,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=members,
    )
    if ours is None:
        return hvd.DistributedOptimizer(optimizer, compression=compression or hvd.Compression.none, **arguments)
    if named_parameters is None:
        pairs = [
            (f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        ]
    else:
        pairs = list(named_parameters)
    arguments["named_parameters"] = pairs
    leave_hooks_untraced()
    # Horovod checks names and arguments first: a mistake there must not leave momentum adopted.
    distributed = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.none, **arguments)
    try:
        ours.bind(pairs, distributed, members, given=optimizer)
    except BaseException:
        # Its hooks stay on the parameters; they must never get as far as reducing a gradient of whoever wraps next.
        distributed.set_backward_passes_per_step(sys.maxsize)
        raise
    distributed.compression, distributed.discard_step = ours, ours.discard_step
    engine = ours.engine
    if engine is None:
        return distributed
    engine.steps.owner = distributed
    distributed._dgc = ours
    # Horovod's methods call super(self.__class__, self), so ours must stand in the same class, not in a subclass.
    cls = type(distributed)
    namespace = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    distributed.__class__ = type(cls.__name__, cls.__bases__, {**namespace, "_allreduce_grad_async": _submit})
    return distributed


@untraced
def _submit(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], None]:
    """Replaces ``_allreduce_grad_async``: start a gradient's exchange, and return how to wait for its result.

    Horovod's ``synchronize()`` calls what is callable after everything was submitted, and sets ``p.grad`` to it.
    """
    engine: Engine = self._dgc.engine
    if engine.is_done() and is_averaged(self):
        # synchronize() once more in the same step: the gradients are the step's results, clipped perhaps.
        engine.require_same_results()
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # taken out of the step by hand
        averaged = p.grad.clone() if p.grad.is_sparse else p.grad
        return lambda: averaged, None
    index = engine.index_of(p)
    if index is None:
        name = self._parameter_names.get(p, "?")
        engine.fail(
            LayoutError(
                f"{name!r} needed no gradient when the optimizer was wrapped, but has one now; wrap it after "
                "all its parameters require gradients"
            )
        )
    assert index is not None
    if p.grad is None:
        # Unused on this rank in this step; the others may have used it.
        p.grad = torch.zeros_like(p)
    gradient = p.grad
    if gradient.is_sparse:
        if not self.sparse_as_dense:
            engine.require_own_momentum(index)
            return self._sparse_allreduce_grad_async(p, self._parameter_names.get(p))
        gradient = gradient.to_dense()
    return functools.partial(_wait, engine, engine.submit(index, gradient)), None


@untraced
def _wait(engine: Engine, result: torch.Tensor) -> torch.Tensor:
    engine.finish()
    return result


def _check_optimizer(optimizer: Any, named_parameters: Any) -> None:
    """What Horovod would take for something else, or wrap twice."""
    if isinstance(named_parameters, CompressorBase):
        raise ConfigError("named_parameters is a compressor; pass it by its name: compression=...")
    if hasattr(type(optimizer), "skip_synchronize"):
        raise ConfigError("this optimizer is distributed already; wrap the plain optimizer once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer")
