"""Parameters must lie apart: what is updated by one rank and sent by another must not be the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgc.errors import LayoutError


def require_separate(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that share elements. Views of one buffer are fine as long as they lie apart.

    Args:
        names: of the tensors, for the error.
        tensors: strided, of one type.

    Raises:
        LayoutError: names the first two that overlap.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel() and tensor.device.type != "meta":
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(i)
    for members in by_storage.values():
        if len(members) == 1:
            continue
        reach = 0
        for start, end, i in sorted((*_bounds(tensors[i]), i) for i in members):
            earlier = members if start < reach else ()  # side by side, as is usual, none has to be looked at
            reach = max(reach, end)
            for j in earlier:
                if i != j and _share_elements(tensors[i], tensors[j]):
                    raise LayoutError(
                        f"{names[min(i, j)]} and {names[max(i, j)]} lie in the same memory, where the ranks that own "
                        "them would overwrite each other's update; to tie weights let both modules hold one Parameter"
                    )


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """First element in the storage, and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start, start + last + 1


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type and storage have an element in common."""
    (start, end), (other_start, other_end) = _bounds(a), _bounds(b)
    if end <= other_start or other_end <= start:
        return False
    base = min(a.storage_offset(), b.storage_offset())
    taken = torch.zeros(max(end, other_end) - base, dtype=torch.bool)
    places = [taken.as_strided(t.shape, t.stride(), t.storage_offset() - base) for t in (a, b)]
    places[0].fill_(True)
    return bool(places[1].any())
