"""One pair of torch's global hooks around ``step()`` of every optimizer, which serves all of this package.

The hooks are never removed: an object may be garbage-collected inside the loop in which torch calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc.torch.untraced import untraced

Before = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[torch.optim.Optimizer], object]

_before: list[Before] = []
_after: list[After] = []


def follow_steps(before: Before, after: After) -> None:
    """Call two functions around ``step()`` of every optimizer from now on; a second call with them does nothing.

    Args:
        before: gets the optimizer, and the arguments of ``step()``, which begin with the optimizer. It returns new
            ones, or None.
        after: gets the optimizer, after a ``step()`` without an error.
    """
    if before in _before:
        return
    if not _before:
        register_optimizer_step_pre_hook(_run_before)
        register_optimizer_step_post_hook(_run_after)
    _before.append(before)
    _after.append(after)


@untraced
def _run_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = None
    for function in _before:
        new = function(optimizer, *(changed or (args, kwargs)))
        changed = new or changed
    return changed


@untraced
def _run_after(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for function in _after:
        function(optimizer)
