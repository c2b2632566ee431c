"""The ranks among which an optimizer is sharded, and the few collectives that it needs of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dgc.adapter.horovod import JOINED
from dgc.core.transport import Transport
from dgc.errors import ConfigError, TransportError
from dgc.torch.engine.horovod.choice import make_transport
from dgc.torch.engine.horovod.held import hold
from dgc.torch.engine.horovod.horovod import HOROVOD, gather_values, import_horovod, member_set
from dgc.torch.engine.horovod.transport import HorovodTransport
from dgc.transport.agreement import ERROR_KEY, require_agreement

_instances = itertools.count()

_PIECE = 2**30
"""Elements per broadcast: MPI counts are int32."""

_PATIENCE = 10.0
"""Seconds for which a rank that does not know its process set tries to tell all ranks so."""

_HISTORY_BYTES = 64 * 2**20
"""Bytes per broadcast of optimizer state: what a rank that does not want it needs for a moment."""


class Ranks:
    """A Horovod process set with names of its own for its tensors.

    Whole parameters go through Horovod's broadcast, everything else through the transport. A rank that called
    ``hvd.join()`` answers Horovod's allreduces and nothing else, and the others would wait for it for ever; so each
    step begins with an allreduce, which runs beside the update.
    """

    def __init__(self, choose: Callable[[], Any]) -> None:
        """Agree on names. Collective over the ranks of the process set.

        Args:
            choose: returns the process set, None for all ranks. Where it raises, the other ranks are told, if they
                belong to the set of all ranks; which other set they mean cannot be known.

        Raises:
            TypeError: what ``choose`` raised.
            ConfigError: the same; or Horovod is not ready or elastic, or this process is not in the set.
            RemoteError: ``choose`` raised on another rank.
            TransportError: a rank has joined.
        """
        self._hvd = import_horovod()
        mistake: Exception | None = None
        try:
            HOROVOD.require_ready()
            chosen = choose()
        except (TypeError, ConfigError) as error:
            mistake, chosen = error, None
        self._holders: dict[int, torch.Tensor] = {}  # by handle; those of what an error left with Horovod stay
        self.members = member_set(chosen)
        all_well = self._meet(mistake)
        answers = gather_values([next(_instances), self._hvd.rank()], "zero.number", self.members)
        # A rank may have made optimizers for other process sets before; the largest number is new to all members.
        self._prefix = f"dgc.zero.{self.members.process_set_id}.{max(number for number, _ in answers)}"
        self._roots = [rank for _, rank in answers]
        self.channel = HorovodTransport(self.members)
        self.transport: Transport = self.channel
        self._roll: int | None = None
        self.rank = self.channel.rank
        self.size = self.channel.size
        if not all_well:
            self.explain_failure(mistake)
            assert mistake is not None
            raise mistake

    def use_transport(self, choice: str | Transport) -> None:
        """Choose what carries the sparse messages. Collective."""
        if self.size > 1 and choice != "horovod":
            self.transport = make_transport(choice, self.members)

    def count(self) -> None:
        """Wait until all ranks are here.

        Raises:
            TransportError: a rank has joined, or Horovod failed.
        """
        self.call_roll()
        self.check_roll()

    def call_roll(self) -> None:
        """Begin to count the ranks that take this step."""
        self.check_roll()  # of a step that was interrupted before it got there
        if self.size > 1:
            one = torch.ones(1)
            holder = hold(one)
            self._roll = self._hvd.allreduce_async_(
                one, name=f"{self._prefix}.roll", op=self._hvd.Sum, process_set=self.members
            )
            self._holders[self._roll] = holder

    def check_roll(self) -> None:
        """Wait for the count.

        Raises:
            TransportError: a rank has joined, or Horovod failed.
        """
        if self._roll is None:
            return
        handle, self._roll = self._roll, None
        try:
            present = round(float(self._hvd.synchronize(handle)))
        except RuntimeError as error:
            raise TransportError(f"Horovod could not count the ranks: {error}") from error
        del self._holders[handle]
        if present != self.size:
            raise TransportError(f"only {present} of {self.size} ranks take part: {JOINED}")

    def gather_status(self, status: Sequence[int]) -> np.ndarray:
        """Every rank's few integers, (P, len(status)) int64."""
        own = np.array(status, np.int64)
        table = np.empty((self.size, own.nbytes), np.uint8)
        self.transport.allgather(own.view(np.uint8), table)
        return table.view(np.int64)

    def explain_failure(self, error: BaseException | None) -> None:
        """After a status that told of a failure: every rank learns which rank failed, and why.

        Args:
            error: this rank's own, if it failed; it is the caller's to raise.

        Raises:
            RemoteError: on the ranks that did not fail.
        """
        own = {} if error is None else {ERROR_KEY: [type(error).__name__, str(error)]}
        try:
            require_agreement(self.transport, own, "the ranks' steps")
        except Exception:
            if error is None:
                raise

    def broadcast(self, tensors: Sequence[tuple[str, int, torch.Tensor]]) -> Callable[[], None]:
        """Start broadcasts of (name, owner, tensor), in place; call the result to wait for them.

        Raises:
            TransportError: Horovod refused, for instance because a rank has joined.
        """
        pending: list[tuple[int, torch.Tensor | None, torch.Tensor]] = []
        for name, owner, tensor in tensors:
            data = tensor.detach()
            flat = data if data.is_contiguous() else data.contiguous()
            target = None if data.is_contiguous() else data
            # Horovod knows no bfloat16 on every backend, and bytes are bytes.
            carried = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
            for i, piece in enumerate(carried.view(-1).split(_PIECE)):
                handle = self._start(piece, owner, f"{name}.{i}")
                pending.append((handle, target, flat))

        def wait() -> None:
            for handle, target, flat in pending:
                self._finish(handle)
                if target is not None:
                    target.copy_(flat)

        return wait

    def collect(self, data: torch.Tensor | None, error: BaseException | None, to: int) -> list[torch.Tensor] | None:
        """Bring every rank's bytes to rank ``to``, one rank after the other.

        Args:
            data: (m,) uint8, m of each rank's own; None if making it failed.
            error: why it failed.
            to: who gets them.

        Returns:
            On rank ``to``, all ranks' bytes in rank order; elsewhere None.

        Raises:
            RemoteError: another rank failed.
            ConfigError: ``to`` differs between the ranks.
            TransportError: a rank has joined.
        """
        self.count()
        table = self.gather_status([-1 if data is None else data.numel(), to])
        lengths = table[:, 0]
        if (lengths < 0).any():
            self.explain_failure(error)
            assert error is not None
            raise error
        if (table[:, 1] != to).any():
            listed = ", ".join(f"{wanted} on rank {rank}" for rank, wanted in enumerate(table[:, 1].tolist()))
            raise ConfigError(f"the ranks disagree about `to`: {listed}; name the same rank everywhere")
        assert data is not None
        found = []
        for owner, length in enumerate(lengths.tolist()):
            parts = []
            for start in range(0, length, _HISTORY_BYTES) if owner != to else ():
                count = min(_HISTORY_BYTES, length - start)
                piece = data[start : start + count] if owner == self.rank else torch.empty(count, dtype=torch.uint8)
                self._finish(self._start(piece, owner, "state"))
                parts.append(piece)
                if self.rank != to:
                    parts.clear()
            found.append(data if owner == to else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8))
        return found if self.rank == to else None

    def _meet(self, mistake: Exception | None) -> bool:
        """Wait until all ranks are here, before the first collective that a joined rank does not answer.

        Returns:
            Whether no rank has made a mistake.
        """
        answer = torch.tensor([1.0, float(mistake is not None)])
        holder = hold(answer)
        name = f"dgc.zero.{self.members.process_set_id}.meet"
        try:
            handle = self._hvd.allreduce_async_(answer, name=name, op=self._hvd.Sum, process_set=self.members)
            self._holders[handle] = holder
            patience = time.monotonic() + _PATIENCE
            while mistake is not None and not self._hvd.poll(handle):
                if time.monotonic() > patience:
                    raise mistake
                time.sleep(0.01)
            present, mistaken = (round(total) for total in self._hvd.synchronize(handle).tolist())
        except RuntimeError as error:
            raise mistake or TransportError(f"Horovod could not count the ranks: {error}") from error
        del self._holders[handle]
        if present != self.members.size():
            raise mistake or TransportError(f"only {present} of {self.members.size()} ranks take part: {JOINED}")
        return not mistaken

    def _start(self, tensor: torch.Tensor, owner: int, name: str) -> int:
        holder = hold(tensor)
        try:
            handle: int = self._hvd.broadcast_async_(
                tensor, root_rank=self._roots[owner], name=f"{self._prefix}.{name}", process_set=self.members
            )
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not broadcast {name} of rank {owner}: {error}") from error
        self._holders[handle] = holder
        return handle

    def _finish(self, handle: int) -> None:
        try:
            self._hvd.synchronize(handle)
        except RuntimeError as error:
            raise TransportError(f"Horovod could not broadcast: {error}") from error
        del self._holders[handle]
