"""Which optimizers may be fused: those that update every element by itself.

An optimizer that looks at a parameter as a whole (its norm, its rank as a matrix, its number of dimensions) gives
another result when it is shown many parameters as one vector. torch's own element-wise classes are listed; a class can
say it of itself; any other is tried out on numbers, which is a heuristic: see :mod:`dgc.torch.fuse.trial`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.torch.fuse.trial import passes_trial

_KNOWN = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)

_DECLARATION = "_fuse_elementwise"

_MEANINGLESS = ("_dynamo_", "_has_dynamo_", "_is_hf_initialized")
"""How attributes begin that torch.compile and Hugging Face's loader leave on parameters, and no optimizer reads."""


def is_trusted(update_class: type[Optimizer]) -> bool:
    """Whether ``update_class`` is element-wise without a doubt: one of torch's, or with ``_fuse_elementwise = True``.

    True counts in the class itself only: a subclass may do what its parent does not.
    """
    return update_class in _KNOWN or vars(update_class).get(_DECLARATION) is True


def is_elementwise(update_class: type[Optimizer], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether ``update_class`` with the options of ``group`` treats a concatenation like its parts.

    Args:
        update_class: the class whose step would be fused.
        group: a parameter group with its options, as they are now: see :func:`option_pattern`.
        defaults: the optimizer's ``defaults``.
    """
    if is_trusted(update_class):
        return True
    if getattr(update_class, _DECLARATION, None) is False:
        return False
    return passes_trial(update_class, group, defaults)


def option_pattern(group: Mapping[str, Any]) -> Hashable:
    """What of a group's options a trial's outcome may depend on; when it changes, a new trial is due.

    Which terms an update has hangs on options that are 0, None, a flag or a name, so numbers count by their sign only:
    a schedule must not ask for a trial in every step. With a learning rate of 0 any class would pass.
    """
    options = tuple((key, _kind(value)) for key, value in group.items() if key not in ("params", "param_names"))
    return len(group["params"]), options


def is_marked(param: Tensor) -> bool:
    """Whether ``param`` has attributes of its own, such as an ``lr_mult``, that an optimizer might read."""
    return bool(param.__dict__) and not all(name.startswith(_MEANINGLESS) for name in param.__dict__)


def _kind(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        # A tensor on a device is not asked: that would wait for the device in every step.
        return _kind(value.item()) if value.numel() == 1 and value.device.type == "cpu" else "tensor"
    if isinstance(value, (int, float)):
        return (value > 0) - (value < 0), math.isfinite(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return type(value).__name__
