"""Who owns which parameter, and where it lies: partition, flat buffers by owner, and no overlap.

P = number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from dgc.errors import LayoutError


class Partition:
    """Owners of the parameters of all groups so far.

    Attributes:
        loads: (P,) elements per rank; carried from group to group, so that the whole model is balanced.
        owners: by group, the owning rank of each parameter in registration order.
    """

    def __init__(self, size: int) -> None:
        """Start with ``size`` = P empty ranks."""
        self.loads = [0] * size
        self.owners: list[list[int]] = []

    def add_group(self, numels: Sequence[int]) -> list[int]:
        """Give each parameter of a new group to the rank with the least elements so far, the largest first.

        Earlier groups keep their owners. Ties go to the lower rank and, among parameters, to the earlier one. Elements
        and owners are in registration order.

        Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054 (stage 1); greedy scheduling after Graham 1969.
        """
        owners = [0] * len(numels)
        for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
            rank = self.loads.index(min(self.loads))
            owners[i] = rank
            self.loads[rank] += numels[i]
        self.owners.append(owners)
        return owners

    def indices(self) -> list[list[list[int]]]:
        """By rank and group, the owned parameters' numbers, counted over all groups in registration order."""
        table: list[list[list[int]]] = [[[] for _ in self.owners] for _ in self.loads]
        number = 0
        for group, owners in enumerate(self.owners):
            for owner in owners:
                table[owner][group].append(number)
                number += 1
        return table


class BucketViews:
    """Flat buffers of the trainable parameters; ``p.data`` points into them.

    Frozen parameters keep memory of their own, and get it back when they were trainable before.
    """

    def __init__(self) -> None:
        """Move nothing yet."""
        self._homes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.buckets: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def build(self, shards: Sequence[Sequence[torch.Tensor]]) -> None:
        """Move the parameters of every owner; again when owners or trainability have changed."""
        before, self._homes = self._homes, {}
        self.buckets = [self._buckets_of(shard) for shard in shards]
        for p in (p for shard in shards for p in shard):
            if id(p) in before and id(p) not in self._homes:
                p.data = p.data.clone()

    def intact(self) -> bool:
        """Whether every parameter still points to its place (``model.to()`` and the like re-point them)."""
        return all(_is_at(p, place) for p, place in self._homes.values())

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy what lies elsewhere to its place and point the parameter there again.

        Raises:
            LayoutError: a parameter has got another shape, type or device.
        """
        for p, place in self._homes.values():
            if _is_at(p, place):
                continue
            if p.shape != place.shape or p.dtype != place.dtype or p.device != place.device:
                raise LayoutError(
                    f"a parameter of {tuple(place.shape)} {place.dtype} on {place.device} became one of "
                    f"{tuple(p.shape)} {p.dtype} on {p.device} during the update; change parameters between two steps"
                )
            place.copy_(p.data)
            p.data = place

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter lies in a bucket."""
        return id(parameter) in self._homes

    def _buckets_of(self, shard: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # By first appearance, not by name: rank 0's cuda:0 is rank 1's cuda:1.
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for p in shard:
            if p.requires_grad and p.numel():
                by_device.setdefault(p.device, []).append(p)
        buckets = []
        for device, members in by_device.items():
            bucket = torch.empty(sum(p.numel() for p in members), dtype=members[0].dtype, device=device)
            start = 0
            for p in members:
                place = bucket[start : start + p.numel()].view(p.shape)
                place.copy_(p.data)
                p.data = place
                self._homes[id(p)] = (p, place)
                start += p.numel()
            buckets.append(bucket)
        return buckets


def _is_at(parameter: torch.Tensor, place: torch.Tensor) -> bool:
    return parameter.data_ptr() == place.data_ptr() and parameter.stride() == place.stride()


def require_separate(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse strided tensors of one type that share elements. Views of one buffer that lie apart are fine.

    Raises:
        LayoutError: names two that overlap.
    """
    by_storage = defaultdict(list)
    for i, t in enumerate(tensors):
        if t.numel() and t.device.type != "meta":
            by_storage[t.untyped_storage().data_ptr()].append(i)
    for numbers in by_storage.values():
        if len(numbers) == 1:
            continue
        first = tensors[numbers[0]]
        owners = torch.full((first.untyped_storage().nbytes() // first.itemsize,), -1, dtype=torch.int32)
        for i in numbers:
            place = owners.as_strided(tensors[i].shape, tensors[i].stride(), tensors[i].storage_offset())
            if (other := int(place.max())) >= 0:
                raise LayoutError(
                    f"{names[other]} and {names[i]} lie in the same memory, where the ranks that own them would "
                    "overwrite each other's update; to tie weights let both modules hold one Parameter"
                )
            place.fill_(i)
