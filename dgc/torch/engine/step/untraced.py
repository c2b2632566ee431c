"""Code that ``torch.compile`` leaves alone.

A script may compile a function that holds ``backward()`` or ``optimizer.step()``. Dynamo then traces whatever Python
runs inside it, and takes the arrays of an exchange for tensors of a graph. What Horovod and PyTorch call of ours in a
step is kept out of that, with all that it calls in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """``function``, which runs as it is within compiled functions too; as ``torch.compiler.disable`` makes one.

    Where torch can be told by a mark on the code itself, no call costs more than before, which tells with thousands of
    small gradients, and importing this package does not import the compiler.
    """
    try:
        leave = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, leave)  # type: ignore[attr-defined]
    except AttributeError:
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def leave_hooks_untraced() -> None:
    """Let ``torch.compile`` leave the hooks alone that Horovod's optimizers give their parameters from now on.

    A compiled function that holds ``backward()`` has them traced, once for each parameter until the compiler has had
    enough. Horovod's own collectives are called from these traces.
    """
    try:
        from horovod.torch import optimizer
    except ImportError:
        return  # who needs Horovod says so
    make = getattr(getattr(optimizer, "_DistributedOptimizer", None), "_make_hook", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_untraced(self: Any, p: torch.Tensor) -> Any:
        return untraced(make(self, p))

    optimizer._DistributedOptimizer._make_hook = make_untraced
