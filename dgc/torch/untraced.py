"""Keep ``torch.compile`` from tracing our code.

A script may compile a function that calls ``backward()`` or ``optimizer.step()``. Dynamo then traces all Python code
inside it, and would treat the arrays of an exchange as tensors of a graph. So the functions of ours that Horovod and
PyTorch call in a step are marked. Dynamo skips them, and everything that they call.
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

    A mark on the code costs no time at a call, which matters with thousands of small gradients, and the compiler need
    not be imported. If this version of torch has no such mark, ``torch.compiler.disable`` is used.
    """
    if not _mark(function.__code__):
        return torch.compiler.disable(function)
    vars(function)["_torchdynamo_disable"] = True
    return function


def weakly(method: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
    """Return a hook that calls a bound method, with ``arguments`` first, and does not keep its object alive.

    Torch's tensors and optimizers keep their hooks alive.
    """
    living = weakref.WeakMethod(method)

    @untraced
    def hook(*others: Any) -> Any:
        bound = living()
        return None if bound is None else bound(*arguments, *others)

    return hook


def leave_hooks_untraced() -> None:
    """Keep ``torch.compile`` from tracing the hooks that Horovod's optimizers register on parameters.

    In a compiled function that calls ``backward()``, the hooks would be traced for each parameter, up to the compiler's
    limit. All hooks share one code object, which is a constant in the code of ``_make_hook``.
    """
    try:
        from horovod.torch.optimizer import _DistributedOptimizer
    except ImportError:
        return  # code that needs Horovod raises its own error
    for constant in _DistributedOptimizer._make_hook.__code__.co_consts:
        if isinstance(constant, CodeType):
            _mark(constant)


def _mark(code: CodeType) -> bool:
    """Mark a code object, so that the compiler skips it and all that it calls; return False if torch has no marks."""
    mark = getattr(eval_frame, "set_code_exec_strategy", None)
    if mark is not None:
        skip = eval_frame._FrameAction.SKIP
        mark(code, eval_frame._FrameExecStrategy(skip, skip))
    return mark is not None
