"""A compressor's state in a checkpoint of ``torch.distributed.checkpoint``, beside a model that FSDP shards."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from dgc.torch.compressor import DGCCompressor


class RankState:
    """A ``Stateful`` of ``torch.distributed.checkpoint`` that keeps every rank's own residuals, momentum and step.

    Give it to ``save`` and ``load`` in the compressor's place. What has one name on all ranks is saved once there, so
    that each rank's state has a name of its own, and is one value of bytes.
    """

    def __init__(self, compression: DGCCompressor) -> None:
        """Take a compressor that is bound to an optimizer. Local: no communication."""
        self._compression = compression
        self._name = f"rank{dist.get_rank()}-of-{dist.get_world_size()}"

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under a name of its own.

        Raises:
            LayoutError: called in the middle of a step, or after one that failed.
        """
        buffer = io.BytesIO()
        torch.save(self._compression.state_dict(), buffer)
        return {self._name: buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; call it on all ranks.

        Raises:
            KeyError: it is of another number of ranks; ``torch.distributed.checkpoint`` has looked for it before.
            LayoutError: it is of another rank or model.
        """
        self._compression.load_state_dict(torch.load(io.BytesIO(state_dict[self._name]), weights_only=True))
