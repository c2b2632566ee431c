"""Who called: Horovod and PyTorch tell a compressor nothing about the optimizer, but it is a local of their frames."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType

import torch


def frames(limit: int | None = None) -> Iterator[FrameType]:
    """The frames of the callers, from the caller's caller outwards, at most ``limit`` of them."""

    def outwards(frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None:
            yield frame
            frame = frame.f_back

    return itertools.islice(outwards(sys._getframe(2)), limit)


def stepping(frame: FrameType) -> torch.optim.Optimizer | None:
    """The optimizer whose ``step`` runs in a frame, if one does."""
    found = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
    return found if isinstance(found, torch.optim.Optimizer) else None
