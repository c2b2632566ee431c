"""Where tensors lie: adjacency, views of one buffer, and the single move of weights into flat memory.

Letters: n elements of a flat buffer. Offsets and lengths count elements, never bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Cache lines and the widest vector loads are 64 bytes; no kernel asks for more than that of a weight.
_ALIGNMENT = 64


def alias(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor on part of ``flat``'s memory that autograd does not know as its view.

    A plain view shares its version counter and its "is a view" flag with its base, and some in-place calls refuse
    views. Gradients and weights handed to the user must behave like ordinary tensors. ``offset`` counts from the start
    of ``flat``.
    """
    out = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return out.set_(flat.untyped_storage(), flat.storage_offset() + offset, tuple(shape), tuple(stride))


def places(tensors: Sequence[Tensor | None]) -> list[tuple[int, tuple[int, ...]]]:
    """Where each lies: its address and strides.

    Raises:
        TypeError: there is None among them.
        RuntimeError: a sparse tensor, which has no storage.
    """
    return list(zip(map(Tensor.data_ptr, tensors), map(Tensor.stride, tensors), strict=True))  # type: ignore[arg-type]


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that ``tensors`` were written, so that a backward pass over values of before is refused."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # older torch takes one tensor at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` fills one gapless piece of memory, each element once, whatever the order of its dimensions."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_fusable_weight(param: Tensor) -> bool:
    """Whether ``param`` could be part of a flat 1-D parameter.

    Exact types only: what a tensor subclass stores is its own affair. A 0-dimensional parameter is left out because
    its per-element state cannot be told from a per-tensor scalar such as Adam's ``step``.
    """
    if type(param) not in (torch.nn.Parameter, Tensor) or param.dim() == 0 or param.is_conj() or param.is_neg():
        return False
    return is_dense(param)


def storage_end(tensor: Tensor) -> int:
    """Address where the storage of ``tensor`` ends.

    Equal addresses are not enough to call two tensors neighbours: two allocations can touch, and a view that starts in
    the first may not reach into the second. What lies before the end of a living storage is that storage.
    """
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def are_parallel(tensors: Sequence[Tensor], weights: Sequence[Tensor], offsets: Sequence[int]) -> bool:
    """Whether m ``tensors`` lie in one storage at the weights' m + 1 offsets, and in the weights' element order."""
    first = tensors[0]
    begin, size = first.data_ptr() - offsets[0] * first.itemsize, first.itemsize
    return (
        [t.data_ptr() for t in tensors] == [begin + offset * size for offset in offsets[:-1]]
        and begin + offsets[-1] * size <= storage_end(first)
        and [t.stride() for t in tensors] == [w.stride() for w in weights]
        and all(t.dtype == first.dtype for t in tensors)
        and not any(t.is_conj() or t.is_neg() for t in tensors)
    )


def adjacent_runs(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split fusable weights into runs without gaps: one storage, one type, ascending addresses.

    Weights that overlap another one (two parameters on the same memory) belong to no run: a plain step updates
    their memory once for each, in the order of the group.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for param in params:
        by_kind[param.dtype, param.device].append(param)
    runs: list[list[Tensor]] = []
    for members in by_kind.values():
        members = _without_overlaps(sorted(members, key=torch.Tensor.data_ptr))
        end, limit = 0, 0
        for param in members:
            begin = param.data_ptr()
            stop = begin + param.numel() * param.itemsize
            if begin == end and stop <= limit:
                runs[-1].append(param)
            else:
                runs.append([param])
                limit = storage_end(param)
            end = stop
    return runs


def _without_overlaps(members: list[Tensor]) -> list[Tensor]:
    """Drop every one of ``members`` (one type, ascending addresses) that shares an element with another."""
    overlapping: set[int] = set()
    end, widest = 0, members[0]
    for param in members:
        if param.data_ptr() < end:
            overlapping.update((id(param), id(widest)))
        stop = param.data_ptr() + param.numel() * param.itemsize
        if stop > end:
            end, widest = stop, param
    return [param for param in members if id(param) not in overlapping]


def flatten_weights(params: Sequence[Tensor], neighbours: Sequence[Tensor]) -> None:
    """Move weights that own their memory into one new buffer per type and device; values and strides stay.

    A weight stays where it is if somebody else may rely on its place: its storage is larger than itself, shared with
    another parameter or with another process, or pinned. Nothing moves if the weights of a kind already lie side by
    side. The storage of ``neighbours``, all other parameters, is not taken apart.

    Order: weights whose size is a multiple of 64 bytes first, then of 32, and so on. So every weight starts at least
    as well aligned as its own size allows, without padding, and matrix kernels keep their fast paths.
    """
    users: dict[int, int] = defaultdict(int)
    for param in {id(p): p for p in (*params, *neighbours)}.values():
        if param.layout is torch.strided:
            users[param.untyped_storage().data_ptr()] += 1

    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for param in params:
        by_kind[param.dtype, param.device].append(param)
    for (dtype, device), members in by_kind.items():
        if len(adjacent_runs(members)) < 2:
            continue
        movable = [p for p in members if _owns_its_memory(p) and users[p.untyped_storage().data_ptr()] == 1]
        if len(movable) < 2:
            continue
        movable.sort(key=_alignment_of, reverse=True)
        flat = torch.empty(sum(p.numel() for p in movable), dtype=dtype, device=device)
        offset = 0
        for param in movable:
            moved = alias(flat, offset, param.shape, param.stride())
            moved.copy_(param.detach())
            param.data = moved
            offset += param.numel()


def _owns_its_memory(param: Tensor) -> bool:
    if param.storage_offset() != 0 or param.untyped_storage().nbytes() != param.numel() * param.itemsize:
        return False
    return param.device.type != "cpu" or not (param.is_shared() or param.is_pinned())


def _alignment_of(param: Tensor) -> int:
    """Largest power of two, at most 64, that divides the size in bytes."""
    size = param.numel() * param.itemsize
    return min(size & -size, _ALIGNMENT)
