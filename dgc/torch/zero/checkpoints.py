"""Shards of optimizer state to and from torch's ordinary state dict.

A full state dict numbers the parameters over all groups, a shard's own numbers only what its rank owns.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dgc.errors import LayoutError
from dgc.torch.zero.groups import Group

Owned = Sequence[Sequence[int]]
"""By group, the full numbers of the parameters that a rank owns, in the order of its local groups."""


def full_entries(local: Mapping[str, Any], owned: Owned) -> dict[Any, Any]:
    """The state of a local ``state_dict()`` under full numbers, its tensors copied to the CPU."""
    return {
        number: _mapped(local["state"][place], lambda t: t.detach().to("cpu", copy=True))
        for place, number in enumerate(n for group in owned for n in group)
        if place in local["state"]
    } | {key: value for key, value in local["state"].items() if not isinstance(key, int)}


def local_dict(full: Mapping[str, Any], owned: Owned) -> dict[str, Any]:
    """What a rank's local optimizer loads: its entries of a full state dict, copied.

    Nothing of ``full`` is changed or shared, so neither loading nor later steps touch the caller's dict.
    """
    groups, state, place = [], {}, 0
    numbering = _numbers(full["param_groups"])
    for saved, members in zip(full["param_groups"], owned, strict=True):
        groups.append(
            {
                **{k: v for k, v in saved.items() if k not in ("params", "param_names")},
                "params": list(range(place, place + len(members))),
            }
        )
        for number in members:
            key = numbering[number]
            if key in full["state"]:
                state[place] = _mapped(full["state"][key], torch.Tensor.clone)
            place += 1
    state.update({k: _mapped(v, torch.Tensor.clone) for k, v in full["state"].items() if not isinstance(k, int)})
    return {"state": state, "param_groups": groups}


def full_dict(
    groups: Iterable[Group], parts: Iterable[Mapping[Any, Any]], partition: Sequence[Owned]
) -> dict[str, Any]:
    """A whole state dict in torch's layout, which shares no tensor with its sources.

    Args:
        groups: the optimizer's full groups.
        parts: by rank, what :func:`full_entries` returned there.
        partition: by rank and group, the numbers of the parameters that the rank owns.
    """
    packed, number = [], 0
    for group in groups:
        numbers = list(range(number, number + len(group["params"])))
        packed.append({**{k: _mapped(v, _copied) for k, v in group.items() if k != "params"}, "params": numbers})
        number += len(numbers)
    entries = {key: _mapped(value, _copied) for part in parts for key, value in part.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (not isinstance(item[0], int), item[0])))
    return {"state": ordered, "param_groups": packed, "partition": [list(map(list, owned)) for owned in partition]}


def require_state_dict(value: Any) -> None:
    """Refuse what is no state dict of an optimizer.

    Raises:
        LayoutError: (a ValueError) it is no dict, or one without ``"state"`` or ``"param_groups"``.
    """
    if not isinstance(value, Mapping):
        found = f"a {type(value).__name__}"
    elif not isinstance(value.get("state"), Mapping) or not _are_groups(value.get("param_groups")):
        found = f"a dict of {sorted(map(str, value))}"
    else:
        return
    raise LayoutError(
        f"an optimizer's state dict holds 'state' and 'param_groups' with 'params', but this is {found}; load on every "
        "rank what state_dict() returned on the rank that consolidate_state_dict(to=...) named"
    )


def check_groups(full: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Refuse a state dict of other groups.

    Raises:
        LayoutError: (a ValueError) another number of groups or of parameters in a group.
    """
    saved = [len(group["params"]) for group in full["param_groups"]]
    if saved != list(lengths):
        raise LayoutError(
            f"the loaded state dict has parameter groups of {saved} parameters, the optimizer of {list(lengths)}; it "
            "belongs to another model or another choice of groups"
        )


def state_of(full: Mapping[str, Any], number: int) -> Any:
    """The entry of the parameter with this number, or None."""
    return full["state"].get(_numbers(full["param_groups"])[number])


def to_bytes(value: Any) -> torch.Tensor:
    """Any value as a (m,) uint8 tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_bytes(data: torch.Tensor) -> Any:
    """The inverse of :func:`to_bytes`; the bytes come from another rank of this job."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)


def _are_groups(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in value)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _numbers(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The state dict's own key of each parameter: usually 0, 1, 2, ... in order."""
    return [key for group in groups for key in group["params"]]


def _mapped(value: Any, change: Any) -> Any:
    """``value`` with ``change`` applied to every tensor inside."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(v, change) for v in value)
    return value
