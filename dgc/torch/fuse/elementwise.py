"""Which optimizers may be fused: those that update every element by itself.

An optimizer that looks at a parameter as a whole (its norm, its rank as a matrix, its number of dimensions) gives
another result when it is shown many parameters as one vector. torch's own element-wise classes are listed; any other
class is tried out on a few numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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

_SHAPES = ((3,), (2, 4), (1,), (2, 1, 2))
_SCALES = (1e-3, 1.0, 1e3, 1.0)
_STEPS = 3


def is_elementwise(update_class: type[Optimizer], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether ``update_class`` with the options of ``group`` treats a concatenation like its parts.

    Unknown classes are built anew and stepped three times on small tensors whose gradients differ in scale, once as
    separate parameters and once as one vector. A class that cannot be built from its options counts as not
    element-wise: stepping it plainly is always right.

    Args:
        update_class: the class whose step would be fused.
        group: a parameter group with its options.
        defaults: the optimizer's ``defaults``.
    """
    if update_class in _KNOWN:
        return True
    like = next((p for p in group["params"] if p.is_floating_point()), None)
    if like is None:
        return False
    devices = [like.device] if like.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            return _concatenates(update_class, group, defaults, like)
    except Exception:  # whatever a foreign class raises, it was not shown to be element-wise
        return False


def _concatenates(
    update_class: type[Optimizer], group: Mapping[str, Any], defaults: Mapping[str, Any], like: Tensor
) -> bool:
    # float64 leaves no doubt between rounding and a different formula.
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=random, dtype=torch.float64).to(like.device) for shape in _SHAPES]
    whole = torch.cat([p.flatten() for p in parts])
    apart = _build(update_class, group, defaults, parts)
    joined = _build(update_class, group, defaults, [whole])
    for _ in range(_STEPS):
        for param, scale in zip(parts, _SCALES, strict=True):
            param.grad = (torch.randn(param.shape, generator=random, dtype=torch.float64) * scale).to(like.device)
        whole.grad = torch.cat([p.grad.flatten() for p in parts])
        apart.step()
        joined.step()
        if not _equal(whole, torch.cat([p.detach().flatten() for p in parts])):
            return False
    return _state_concatenates([apart.state.get(p, {}) for p in parts], joined.state.get(whole, {}), parts, whole)


def _build(
    update_class: type[Optimizer], group: Mapping[str, Any], defaults: Mapping[str, Any], params: list[Tensor]
) -> Optimizer:
    accepted = inspect.signature(update_class.__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    options = {key: value for key, value in defaults.items() if anything or key in accepted}
    for param in params:
        param.requires_grad_()
    named = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return update_class([{"params": params, **named}], **options)


def _state_concatenates(apart: list[dict], joined: dict, parts: list[Tensor], whole: Tensor) -> bool:
    """Whether every state is per element, with the right values, or one value for the whole parameter."""
    for key, value in joined.items():
        pieces = [state[key] for state in apart]
        if not isinstance(value, Tensor):
            if any(piece != value for piece in pieces):
                return False
        elif value.shape == whole.shape:
            if any(piece.shape != part.shape for piece, part in zip(pieces, parts, strict=True)):
                return False
            if not _equal(value, torch.cat([piece.flatten() for piece in pieces])):
                return False
        elif value.numel() != 1 or any(piece.shape != value.shape or not _equal(value, piece) for piece in pieces):
            return False
    return all(state.keys() == joined.keys() for state in apart)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=0.0, equal_nan=True)
