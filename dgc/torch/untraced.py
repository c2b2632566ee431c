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
    """``function``, which runs as it is within compiled functions too; as ``torch.compiler.disable`` makes one.

    Where torch can be told by a mark on the code itself, no call costs more than before, which tells with thousands of
    small gradients, and importing this package does not import the compiler.
    """
    if not _mark(function.__code__):
        return torch.compiler.disable(function)
    vars(function)["_torchdynamo_disable"] = True
    return function


def weakly(method: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
    """A hook that calls a bound method with ``arguments`` first, while its object lives, which it does not keep alive.

    Torch's tensors and optimizers keep their hooks.
    """
    living = weakref.WeakMethod(method)

    @untraced
    def hook(*others: Any) -> Any:
        bound = living()
        return None if bound is None else bound(*arguments, *others)

    return hook


def leave_hooks_untraced() -> None:
    """Let ``torch.compile`` leave the hooks alone that Horovod's optimizers give their parameters.

    A compiled function that holds ``backward()`` has them traced, once for each parameter until the compiler has had
    enough. All of them share one code, inside that of ``_make_hook``. Where torch knows no mark, they are traced.
    """
    try:
        from horovod.torch.optimizer import _DistributedOptimizer
    except ImportError:
        return  # who needs Horovod says so
    for constant in _DistributedOptimizer._make_hook.__code__.co_consts:
        if isinstance(constant, CodeType):
            _mark(constant)


def _mark(code: CodeType) -> bool:
    """Tell the compiler to skip a code, and what it calls; False where this torch cannot be told."""
    mark = getattr(eval_frame, "set_code_exec_strategy", None)
    if mark is not None:
        skip = eval_frame._FrameAction.SKIP
        mark(code, eval_frame._FrameExecStrategy(skip, skip))
    return mark is not None
