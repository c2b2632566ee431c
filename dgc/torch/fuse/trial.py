"""Trying out an unknown optimizer class: are the steps of a concatenation those of its parts?

No trial can prove it. What is looked for are the habits of published optimizers: norms, matrices and convolutions
treated apart, sizes from which on something else happens, what begins after some steps, what goes by a parameter's
name or number, and state that is kept outside ``state``.
"""

from __future__ import annotations

import copy
import enum
import inspect
import itertools
import math
import types
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.torch.fuse.seam import StepSeam

_SHAPES = ((3,), (2, 4), (1,), (2, 1, 2), (2, 3, 1, 2), (1, 2, 2, 1, 2))
_LONG = 100
"""Steps on few elements: warm-ups of some steps shall end."""
_SHORT = 4
"""Steps on the group's own shapes."""

_SCALES = (1e-3, 1.0, 1e3, 1.0)
_MOST_TENSORS = 64
_MOST_ELEMENTS = 2**16
"""Of one tensor; larger ones are cut down, each dimension kept."""
_LEAST_TOTAL, _MOST_TOTAL = 2**13, 2**18
"""Elements that one long vector adds to the group's own shapes, so that the whole is as large as it will be."""

_PLAIN = (
    bool,
    int,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    type,
    types.FunctionType,
    types.BuiltinMethodType,
)
_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)


@dataclass(frozen=True)
class _Part:
    shape: tuple[int, ...]
    name: str | None = None


def passes_trial(update_class: type[Optimizer], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Build ``update_class`` anew and step it on separate parameters and on one vector of all their elements.

    Once for many steps on small tensors of one to five dimensions, and once for a few steps on the group's shapes, with
    the parameters' names where the group has them, and a long vector. Gradients differ in scale.

    A class that cannot be built from its options does not pass: stepping it plainly is always right. Random number
    generators, the group and its options are left as they are; step hooks are not called.

    Args:
        update_class: the class whose step would be fused.
        group: a parameter group with its options.
        defaults: the optimizer's ``defaults``.
    """
    like = next((p for p in group["params"] if p.is_floating_point()), None)
    if like is None:
        return False
    devices = [like.device] if like.device.type == "cuda" else []
    trials = ([_Part(shape) for shape in _SHAPES], _LONG), (_own_parts(group), _SHORT)
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            return all(_concatenates(update_class, group, defaults, like, *trial) for trial in trials)
    except Exception:  # whatever a foreign class raises, it was not shown to be element-wise
        return False


def _own_parts(group: Mapping[str, Any]) -> list[_Part]:
    """The group's shapes, each one once before any comes twice, and one long vector."""
    params = group["params"]
    names = group.get("param_names") or [None] * len(params)
    seen: dict[tuple[int, ...], int] = {}
    parts = []
    for param, name in zip(params, names, strict=True):
        shape = _cut_down(tuple(param.shape))
        seen[shape] = seen.get(shape, 0) + 1
        parts.append((seen[shape], _Part(shape, name)))
    chosen = [part for _, part in sorted(parts, key=lambda item: item[0])][:_MOST_TENSORS]
    ends = itertools.accumulate(math.prod(part.shape) for part in chosen)
    chosen = [part for part, end in zip(chosen, ends, strict=True) if end <= _MOST_TOTAL]
    total = sum(p.numel() for p in params)
    long = (min(max(total, _LEAST_TOTAL), _MOST_TOTAL),)
    return [*chosen, _Part(long, None if names[0] is None else "long")]


def _cut_down(shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    while math.prod(sizes) > _MOST_ELEMENTS:
        largest = sizes.index(max(sizes))
        sizes[largest] //= 2
    return tuple(sizes)


def _concatenates(
    update_class: type[Optimizer],
    group: Mapping[str, Any],
    defaults: Mapping[str, Any],
    like: Tensor,
    shapes: Sequence[_Part],
    steps: int,
) -> bool:
    held_by_class = _held_by_class(update_class)
    # float64 leaves no doubt between rounding and a different formula.
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(part.shape, generator=random, dtype=torch.float64).to(like.device) for part in shapes]
    whole = torch.cat([p.flatten() for p in parts])
    # The fused parameter has no name, whatever its members are called.
    apart = _build(update_class, group, defaults, parts, [part.name for part in shapes])
    joined = _build(update_class, group, defaults, [whole], [None])
    for _ in range(steps):
        for param, scale in zip(parts, itertools.cycle(_SCALES)):
            param.grad = (torch.randn(param.shape, generator=random, dtype=torch.float64) * scale).to(like.device)
        whole.grad = torch.cat([p.grad.flatten() for p in parts if p.grad is not None])
        for optimizer in (apart, joined):
            StepSeam(optimizer, update_class).plain_step(optimizer)
        if not whole.isfinite().all() or not _equal(whole, torch.cat([p.detach().flatten() for p in parts])):
            return False
    return (
        _state_concatenates([apart.state.get(p, {}) for p in parts], joined.state.get(whole, {}), parts, whole)
        and _alike(_beside_state(apart), _beside_state(joined))
        and held_by_class == _held_by_class(update_class)
    )


def _build(
    update_class: type[Optimizer],
    group: Mapping[str, Any],
    defaults: Mapping[str, Any],
    params: list[Tensor],
    names: list[str | None],
) -> Optimizer:
    accepted = inspect.signature(update_class.__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    options = {key: value for key, value in defaults.items() if anything or key in accepted}
    for param in params:
        param.requires_grad_()
    given: list[Any] = params if names[0] is None else list(zip(names, params, strict=True))
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    # Copies: an optimizer may write to a learning rate that is a tensor.
    return update_class([{"params": given, **copy.deepcopy(own)}], **copy.deepcopy(options))


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


def _beside_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer has on itself and in its group, without its state and what torch puts there."""
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups", "defaults") and not key.startswith("_optimizer_")
    }
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    return {"itself": own, "group": options}


def _alike(a: Any, b: Any) -> bool:
    """Whether two values cannot depend on how many parameters there are, or which.

    A dictionary by parameter, a list with a place for each, or a flat buffer of all shows itself by its length. What
    is of an unknown type could hide one.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.numel() == 1 and a.shape == b.shape and _equal(a, b)
    if isinstance(a, dict):
        return (
            a.keys() == b.keys()
            and not any(isinstance(key, Tensor) for key in a)
            and all(_alike(value, b[key]) for key, value in a.items())
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, (set, frozenset)):
        return a == b
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__
    return a is b or (isinstance(a, _PLAIN) and a == b)


def _held_by_class(update_class: type[Optimizer]) -> dict[tuple[type, str], int]:
    """Lengths of the containers in the class itself, where state of all its optimizers may gather."""
    return {
        (cls, name): len(value)
        for cls in update_class.__mro__
        for name, value in vars(cls).items()
        if isinstance(value, _CONTAINERS)
    }


def _equal(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().double(), b.detach().double()
    # An element near 0 has no relative precision to speak of after many steps.
    largest = b.abs().nan_to_num(0.0, 0.0).max().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12 * largest, equal_nan=True)
