"""The ranks that save or load a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from dgc.core.transport import Transport
from dgc.errors import ConfigError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.transport.agreement import agree_or_raise


class Ranks:
    """Who takes part: the ranks that exchange gradients, or this process alone.

    Attributes:
        rank: this rank among them.
        size: their number.
        takes_part: whether this process is one of them.
    """

    def __init__(self, compression: DGCCompressor, what: str) -> None:
        """Local: no communication.

        Args:
            compression: the compressor.
            what: is called, for errors.

        Raises:
            ConfigError: it is not bound to a model, so that its ranks are not known.
            LayoutError: a step is under way, in which the transport belongs to the exchange.
            TransportError: it was closed.
        """
        engine = compression.engine
        self._transport: Transport | None = None
        self.rank, self.size, self.takes_part = 0, 1, compression.takes_part
        if engine is not None:
            engine.require_open(what)
            engine.require_between_steps(what)
            self._transport = engine.transport
            self.rank, self.size = engine.transport.rank, engine.transport.size
        elif not compression.is_bound and _started_ranks() > 1:
            raise ConfigError(
                f"{what} was called before the compressor knows its ranks: wrap the optimizer first, "
                "dgc.torch.DistributedOptimizer(optimizer, ..., compression=compression)"
            )

    def agree(self, work: Callable[[], dict[str, Any]], what: str) -> None:
        """Do something on all ranks; an error on one of them is raised on all.

        Args:
            work: returns what all ranks must have in common.
            what: it does, for errors.

        Raises:
            Exception: what ``work`` raised on this rank.
            DGCError: it raised on another rank, or the ranks differ.
        """
        if self._transport is None:
            work()
        else:
            agree_or_raise(self._transport, work, f"results of the attempt to {what}", TransportError)

    def busy(self) -> AbstractContextManager[None]:
        """While this rank works, and the others wait for as long as that takes."""
        return nullcontext() if self._transport is None else self._transport.busy()

    def any(self, here: bool) -> bool:
        """Whether something is so on any rank. Collective.

        Raises:
            TransportError: the ranks could not be asked.
        """
        return bool(self._gather(np.array([here], np.uint8)).any())

    def of_first(self, text: str, length: int) -> str:
        """What rank 0 has given, in ASCII. Collective.

        Args:
            text: cut off after ``length``.
            length: characters, the same on all ranks.

        Raises:
            TransportError: the ranks could not be asked.
        """
        own = np.frombuffer(text.encode("ascii", "replace").ljust(length)[:length], np.uint8).copy()
        return self._gather(own)[0].tobytes().decode().rstrip()

    def _gather(self, own: np.ndarray) -> np.ndarray:
        if self._transport is None:
            return own[None]
        gathered = np.empty((self.size, own.size), np.uint8)
        self._transport.allgather(own, gathered)
        return gathered


def _started_ranks() -> int:
    try:
        return int(HOROVOD.module().size())
    except ConfigError:
        return 1
