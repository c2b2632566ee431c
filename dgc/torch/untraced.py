"""Code that ``torch.compile`` leaves alone.

A script may compile a function that holds ``backward()`` or ``optimizer.step()``. Dynamo then traces whatever Python
runs inside it, and takes the arrays of an exchange for tensors of a graph. What Horovod and PyTorch call of ours in a
step is kept out of that, with all that it calls in turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Return a function that ``torch.compile`` does not trace, as ``torch.compiler.disable`` does.

    A mark on the code costs nothing at a call, which matters with thousands of small gradients, and needs no import of
    the compiler. A torch that has no such mark gets ``torch.compiler.disable``.
    """
    if not _mark(function.__code__):
        return torch.compiler.disable(function)
    vars(function)["_torchdynamo_disable"] = True
    return function


def weakly(method: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
    """Return a hook that calls a bound method, ``arguments`` first, and does not keep its object alive.

    Torch's tensors and optimizers keep their hooks.
    """
    living = weakref.WeakMethod(method)

    @untraced
    def hook(*others: Any) -> Any:
        bound = living()
        return None if bound is None else bound(*arguments, *others)

    return hook


def leave_hooks_untraced() -> None:
    """Keep ``torch.compile`` from tracing the hooks that Horovod's optimizers give their parameters.

    In a compiled function that holds ``backward()`` they are traced for each parameter, up to the compiler's limit. All
    of them share one code object, inside that of ``_make_hook``.
    """
    try:
        from horovod.torch.optimizer import _DistributedOptimizer
    except ImportError:
        return  # who needs Horovod says so
    for constant in _DistributedOptimizer._make_hook.__code__.co_consts:
        if isinstance(constant, CodeType):
            _mark(constant)


def _mark(code: CodeType) -> bool:
    """Tell the compiler to skip a code object and all that it calls; return False if this torch has no such mark."""
    mark = getattr(eval_frame, "set_code_exec_strategy", None)
    if mark is not None:
        skip = eval_frame._FrameAction.SKIP
        mark(code, eval_frame._FrameExecStrategy(skip, skip))
    return mark is not None
