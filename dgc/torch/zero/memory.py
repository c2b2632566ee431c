"""Parameters as views of one flat buffer for each owner and device, so that a broadcast moves many at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgc.errors import LayoutError


class BucketViews:
    """Flat buffers of the trainable parameters; ``p.data`` points into them.

    Frozen parameters keep memory of their own, and get it back when they were trainable before.
    """

    def __init__(self, shards: Sequence[Sequence[torch.Tensor]]) -> None:
        """Move the parameters.

        Args:
            shards: by owner, its parameters.
        """
        self._homes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.build(shards)

    @torch.no_grad()
    def build(self, shards: Sequence[Sequence[torch.Tensor]]) -> None:
        """Move the parameters again, after owners or trainability have changed."""
        before = self._homes
        self._homes = {}
        self.buckets: list[list[torch.Tensor]] = [self._buckets_of(shard) for shard in shards]
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
