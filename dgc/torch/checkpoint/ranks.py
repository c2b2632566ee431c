"""The ranks that save or load a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dgc.core.transport import Transport
from dgc.errors import ConfigError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.distributed import job_of
from dgc.torch.engine.tensors import is_sharded
from dgc.transport.agreement import agree_or_raise
from dgc.transport.local import local_world


class Ranks:
    """Who takes part: the ranks that exchange gradients, or this process alone.

    Attributes:
        transport: connects them.
        rank: this rank among them.
        size: their number.
        takes_part: whether this process is one of them.
    """

    def __init__(self, model: torch.nn.Module, compression: DGCCompressor, what: str) -> None:
        """Local: no communication.

        Args:
            model: whose parameters must not be sharded.
            compression: the compressor.
            what: is called, for errors.

        Raises:
            ConfigError: the model is sharded, or the compressor not bound to one, so that its ranks are not known.
            LayoutError: a step is under way, in which the transport belongs to the exchange.
            TransportError: it was closed.
        """
        if any(map(is_sharded, model.parameters())):
            raise ConfigError(
                f"{what} knows no sharded parameters: give model, optimizer and dgc.torch.RankState(compression) to "
                "torch.distributed.checkpoint, as docs/fsdp.md shows"
            )
        engine = compression.engine
        if engine is not None:
            engine.require_open(what)
            engine.require_between_steps(what)
        elif not compression.is_bound and _started_ranks() > 1:
            raise ConfigError(
                f"{what} was called before the compressor knows its ranks: wrap the optimizer first, "
                "dgc.torch.DistributedOptimizer(optimizer, ..., compression=compression)"
            )
        self.transport: Transport = local_world(1)[0] if engine is None else engine.transport
        self.rank, self.size = self.transport.rank, self.transport.size
        self.takes_part = compression.takes_part

    def agree(self, work: Callable[[], dict[str, Any]], what: str) -> None:
        """Do something on all ranks; an error on one of them is raised on all.

        Args:
            work: returns what all ranks must have in common.
            what: it does, for errors.

        Raises:
            Exception: what ``work`` raised on this rank.
            DGCError: it raised on another rank, or the ranks differ.
        """
        agree_or_raise(self.transport, work, f"results of the attempt to {what}", TransportError)

    def gather(self, text: str, length: int) -> list[str]:
        """Gather every rank's ASCII text. Collective.

        Args:
            text: cut off after ``length``.
            length: characters, the same on all ranks.

        Raises:
            TransportError: a collective failed.
        """
        own = np.frombuffer(text.encode("ascii", "replace").ljust(length)[:length], np.uint8).copy()
        gathered = np.empty((self.size, length), np.uint8)
        self.transport.allgather(own, gathered)
        return [row.tobytes().decode().rstrip() for row in gathered]


def _started_ranks() -> int:
    job = job_of()
    try:
        job.require_ready()
        return job.size
    except ConfigError:
        return 1
