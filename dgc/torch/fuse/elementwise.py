"""Which optimizers may be fused: those that update every element of a parameter by itself.

An optimizer that looks at a parameter as a whole (its norm, its rank as a matrix, its place in the group) gives
another result when it is shown many parameters as one vector. It cannot be seen from outside which ones do, so torch's
element-wise classes are listed here, and of any other class the user says so.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from dgc.errors import ConfigError
from dgc.torch.fuse.seam import step_without_hooks

_ELEMENTWISE = (
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
)
_NOT_ELEMENTWISE = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon", "SparseAdam") if hasattr(torch.optim, name)
)

_LOOK_AT_ALL = (
    frozenset({"Prodigy", "ProdigyPlusScheduleFree"})
    | {"DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptAdanIP", "DAdaptLion", "DAdaptSGD"}
    | {"Adai", "AdaiV2", "AdaGC", "AvaGrad", "AliG", "Ranger21"}
    | {"SAM", "ASAM", "BSAM", "FriendlySAM", "GSAM", "LookSAM", "WSAM"}
)


def looks_at_all_parameters(update_class: type[Optimizer]) -> bool:
    """Whether ``update_class`` is, by its name, one that computes a step size, norm or mean over all parameters.

    Their authors publish them under these names, in several packages; whether a class of another name does so cannot
    be seen from outside.
    """
    return any(cls.__name__ in _LOOK_AT_ALL for cls in update_class.__mro__)


def is_elementwise(update_class: type[Optimizer], declared: bool | None = None) -> bool:
    """Whether ``update_class`` updates a concatenation of parameters as it updates its parts.

    Args:
        update_class: the class whose ``step`` would be fused.
        declared: what the user says of it; None: only torch's own classes are known to be.

    Raises:
        ConfigError: declared of a class that is known not to be.
    """
    never = is_never_elementwise(update_class)
    if declared and never:
        raise ConfigError(
            f"{update_class.__name__} does not update every element by itself, so it cannot be fused: "
            "leave elementwise=True away, and it is stepped plainly."
        )
    if declared is not None:
        return declared
    return not never and _steps_like_one_of(_ELEMENTWISE, update_class)


def is_never_elementwise(update_class: type[Optimizer]) -> bool:
    """Whether ``update_class`` is known to look at whole parameters.

    A class says so of itself and its subclasses with ``_fuse_elementwise = False``.
    """
    return (
        getattr(update_class, "_fuse_elementwise", None) is False
        or looks_at_all_parameters(update_class)
        or _steps_like_one_of(_NOT_ELEMENTWISE, update_class)
    )


def _steps_like_one_of(known: tuple[type[Optimizer], ...], update_class: type[Optimizer]) -> bool:
    """Whether ``update_class`` is one of ``known``, or a subclass that overrides nothing of its step."""
    return any(
        issubclass(update_class, cls)
        and step_without_hooks(update_class) is step_without_hooks(cls)
        and getattr(update_class, "_init_group", None) is getattr(cls, "_init_group", None)
        for cls in known
    )
