"""The compressor's state in a checkpoint of ``torch.distributed.checkpoint``, where every rank writes its own part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dgc.torch.compressor import DGCCompressor
from dgc.torch.packing import packed, unpacked


class RankState:
    """A ``Stateful`` of ``torch.distributed.checkpoint`` for models whose parameters FSDP has sharded.

    Give it to ``save`` and ``load`` instead of the compressor. Each rank's state belongs to its own shards, and
    ``torch.distributed.checkpoint`` saves a value only once if it has the same name on all ranks. So each rank's state,
    as bytes, gets a different name.
    """

    def __init__(self, compression: DGCCompressor, optimizer: torch.optim.Optimizer) -> None:
        """``compression`` is bound to ``optimizer``."""
        self._compression, self._optimizer = compression, optimizer
        self._name = f"rank{dist.get_rank()}-of-{dist.get_world_size()}"

    def state_dict(self) -> dict[str, Any]:
        """Call ``compression.average(optimizer)``; return this rank's state, under a name that no other rank uses.

        Collective, between steps. ``dcp.load`` calls this method, too.

        Raises:
            LayoutError: a step is under way or has failed.
        """
        self._compression.average(self._optimizer)
        return {self._name: packed(self._compression.state_dict(), "the compressor's state").tobytes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`. Call it on all ranks.

        Raises:
            KeyError: it was saved by a different number of ranks.
            LayoutError: it belongs to another model.
        """
        self._compression.load_state_dict(unpacked(state_dict[self._name]))
