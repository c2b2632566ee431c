"""The ranks among which an optimizer is sharded, and the few collectives that it needs of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dgc.adapter.job import JOINED
from dgc.core.transport import Transport
from dgc.errors import ConfigError, TransportError
from dgc.torch.distributed import DistributedJob, job_of
from dgc.torch.horovod import HOROVOD, HorovodTransport, hold
from dgc.transport.agreement import require_agreement, tell_error

COUNT_BYTES = 4
"""Bytes that counting the ranks costs."""

_PIECE = 2**30
"""Elements per broadcast: MPI counts are int32."""

_PATIENCE = 10.0
"""Seconds for which a rank without a valid process set waits for the ranks of the set of all ranks."""

_STATE_BYTES = 64 * 2**20
"""Bytes per broadcast of optimizer state: what a rank that does not want it needs for a moment."""


class Ranks:
    """A Horovod process set with names of its own for its tensors.

    Whole parameters go through Horovod's broadcast, everything else through the transport. A rank that called
    ``hvd.join()`` answers Horovod's allreduces and nothing else, and the others would wait for it for ever; so each
    step begins with an allreduce that counts the ranks, which runs beside the update.
    """

    def __init__(self, choose: Callable[[], Any]) -> None:
        """Agree on names. Collective over the ranks of the process set.

        Args:
            choose: returns the process set, None for all ranks. Where it raises, so do the other ranks, if they belong
                to the set of all ranks; which other set was meant cannot be known.

        Raises:
            TypeError: what ``choose`` raised.
            ConfigError: the same; or Horovod is not ready or elastic, or this process is not in the set.
            RemoteError: ``choose`` raised on another rank.
            TransportError: a rank has joined.
        """
        if isinstance(job_of(), DistributedJob):
            raise ConfigError(
                "dgc.torch.ZeroRedundancyOptimizer needs Horovod and hvd.init(); over torch.distributed shard with "
                "FSDP2, as docs/fsdp.md shows"
            )
        self._hvd = HOROVOD.module()
        mistake: Exception | None = None
        try:
            HOROVOD.require_ready()
            chosen = choose()
        except (TypeError, ConfigError) as error:
            mistake, chosen = error, None
        self._holders: dict[int, torch.Tensor] = {}  # by handle; those of what an error left with Horovod stay
        self._counting: int | None = None
        self._job = HOROVOD.of(chosen)
        self.members = self._job.require_member()
        self.size = self._job.size
        self._prefix = f"dgc.zero.{self.members.process_set_id}"
        self._meet(mistake)
        self._prefix = self._job.unique_name("dgc.zero")
        self._roots = self._job.ranks()
        self.channel = HorovodTransport(self._job)
        self.transport: Transport = self.channel
        self.rank = self.channel.rank
        if mistake is not None:
            tell_error(self.channel, mistake)
            raise mistake
        require_agreement(self.channel, {}, "process sets")

    def use_transport(self, choice: str | Transport) -> None:
        """Choose what carries the sparse messages. Collective."""
        if self.size > 1 and choice != "horovod":
            self.transport = self._job.make_transport(choice)

    def begin_count(self) -> None:
        """Begin to count the ranks that take this step.

        Raises:
            TransportError: Horovod refused.
        """
        self.end_count()  # of a step that was interrupted
        if self.size > 1:
            self._counting = self._start(self._hvd.allreduce_async_, torch.ones(1), "count", op=self._hvd.Sum)

    def end_count(self) -> None:
        """Wait for the count, if one has begun.

        Raises:
            TransportError: a rank has joined, or Horovod failed.
        """
        if self._counting is None:
            return
        handle, self._counting = self._counting, None
        present = round(float(self._finish(handle)))
        if present != self.size:
            raise TransportError(f"only {present} of {self.size} ranks take part: {JOINED}")

    def gather_status(self, status: Sequence[int]) -> np.ndarray:
        """Every rank's few integers, (P, len(status)) int64."""
        own = np.array(status, np.int64)
        table = np.empty((self.size, own.nbytes), np.uint8)
        self.transport.allgather(own.view(np.uint8), table)
        return table.view(np.int64)

    def broadcast(self, tensors: Iterable[tuple[str, int, torch.Tensor]]) -> Callable[[], None]:
        """Start broadcasts of (name, owner, tensor), in place; call the result to wait for them.

        Raises:
            TransportError: Horovod refused, for instance because a rank has joined.
        """
        pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for name, owner, tensor in tensors:
            data = tensor.detach()
            flat = data.contiguous()
            # Horovod knows no bfloat16 on every backend, and bytes are bytes.
            carried = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
            for i, piece in enumerate(carried.view(-1).split(_PIECE)):
                handle = self._start(self._hvd.broadcast_async_, piece, f"{name}.{i}", root_rank=self._roots[owner])
                pending.append((handle, data, flat))

        def wait() -> None:
            for handle, data, flat in pending:
                self._finish(handle)
                if not data.is_contiguous():
                    data.copy_(flat)

        return wait

    def collect(self, data: torch.Tensor, to: int) -> list[torch.Tensor] | None:
        """Bring every rank's (m,) uint8, m of each rank's own, to rank ``to``, one rank after the other.

        Returns:
            All ranks' bytes in rank order on rank ``to``; None on the others.
        """
        found = []
        for owner, length in enumerate(self.gather_status([data.numel()])[:, 0].tolist()):
            whole = self.rank in (owner, to)
            space = data if owner == self.rank else data.new_empty(length if whole else min(length, _STATE_BYTES))
            for start in range(0, length if owner != to else 0, _STATE_BYTES):
                piece = space[start if whole else 0 :][: min(_STATE_BYTES, length - start)]
                self.broadcast([("state", owner, piece)])()
            found.append(space)
        return found if self.rank == to else None

    def _meet(self, mistake: Exception | None) -> None:
        """Wait until all ranks are here, before the first collective that a joined rank does not answer."""
        try:
            self.begin_count()
            patience = time.monotonic() + _PATIENCE
            while mistake is not None and self._counting is not None and not self._hvd.poll(self._counting):
                if time.monotonic() > patience:
                    raise mistake
                time.sleep(0.01)
            self.end_count()
        except TransportError as error:
            raise mistake or error from error

    def _start(self, collective: Callable[..., int], tensor: torch.Tensor, name: str, **options: object) -> int:
        holder = hold(tensor)
        try:
            handle = collective(tensor, name=f"{self._prefix}.{name}", process_set=self.members, **options)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not begin {self._prefix}.{name}: {error}") from error
        self._holders[handle] = holder
        return handle

    def _finish(self, handle: int) -> torch.Tensor:
        try:
            result: torch.Tensor = self._hvd.synchronize(handle)
        except RuntimeError as error:
            raise TransportError(f"Horovod could not count the ranks, or send their parameters: {error}") from error
        del self._holders[handle]
        return result
