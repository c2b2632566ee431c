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
    views. Gradients and weights handed to the user must behave like ordinary tensors.

    Args:
        flat: (n,) contiguous.
        offset: first element, counted from the start of ``flat``.
        shape: of the result.
        stride: of the result.
    """
    out = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return out.set_(flat.untyped_storage(), flat.storage_offset() + offset, tuple(shape), tuple(stride))


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
    return type(param) in (torch.nn.Parameter, Tensor) and param.dim() > 0 and is_dense(param)


def follows(tensor: Tensor, previous: Tensor, distance: int) -> bool:
    """Whether ``tensor`` begins ``distance`` elements after ``previous`` in the same storage.

    Equal addresses are not enough: two allocations can happen to be neighbours, and a view across both would leave
    the first one's storage.
    """
    if tensor.dtype != previous.dtype or tensor.data_ptr() - previous.data_ptr() != distance * tensor.itemsize:
        return False
    storage, before = tensor.untyped_storage(), previous.untyped_storage()
    return storage.data_ptr() == before.data_ptr() and storage.nbytes() == before.nbytes()


def are_parallel(tensors: Sequence[Tensor], weights: Sequence[Tensor], offsets: Sequence[int]) -> bool:
    """Whether ``tensors`` lie in one storage at the same offsets, and in the same element order, as their weights."""
    first = tensors[0]
    return all(
        tensor.stride() == weight.stride()
        and not (tensor.is_conj() or tensor.is_neg())
        and (i == 0 or follows(tensor, first, offsets[i] - offsets[0]))
        for i, (tensor, weight) in enumerate(zip(tensors, weights, strict=True))
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
        run: list[Tensor] = []
        for param in members:
            if run and not follows(param, run[-1], run[-1].numel()):
                runs.append(run)
                run = []
            run.append(param)
        runs.append(run)
    return [run for run in runs if run]


def _without_overlaps(members: list[Tensor]) -> list[Tensor]:
    """Drop every one of ``members`` (one type, ascending addresses) that shares an element with another."""
    kept, overlapping = list(members), set()
    end, widest = 0, None
    for param in members:
        if param.data_ptr() < end:
            overlapping.update((id(param), id(widest)))
        stop = param.data_ptr() + param.numel() * param.itemsize
        if stop > end:
            end, widest = stop, param
    return [param for param in kept if id(param) not in overlapping]


def place_weights(params: Sequence[Tensor], neighbours: Sequence[Tensor]) -> None:
    """Move weights that own their memory into one new buffer per type and device; values and strides stay.

    A weight stays where it is if somebody else may rely on its place: its storage is larger than itself, shared with
    another parameter or with another process, or pinned. Nothing moves if the weights of a kind already lie side by
    side.

    Order: weights whose size is a multiple of 64 bytes first, then of 32, and so on. So every weight starts at least
    as well aligned as its own size allows, without padding, and matrix kernels keep their fast paths.

    Args:
        params: fusable weights, given new storage in place (``param.data``).
        neighbours: all other parameters, whose storage must not be taken apart.
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
        movable.sort(key=_coarseness, reverse=True)
        flat = torch.empty(sum(p.numel() for p in movable), dtype=dtype, device=device)
        offset = 0
        for param in movable:
            home = alias(flat, offset, param.shape, param.stride())
            home.copy_(param.detach())
            param.data = home
            offset += param.numel()


def _owns_its_memory(param: Tensor) -> bool:
    if param.storage_offset() != 0 or param.untyped_storage().nbytes() != param.numel() * param.itemsize:
        return False
    return param.device.type != "cpu" or not (param.is_shared() or param.is_pinned())


def _coarseness(param: Tensor) -> int:
    """Largest power of two, at most 64, that divides the size in bytes."""
    size = param.numel() * param.itemsize
    return min(size & -size, _ALIGNMENT)
