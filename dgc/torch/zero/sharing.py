"""After the update: every owner's new parameter values reach all ranks, as entries or whole, bit for bit.

P = number of ranks, n_r = elements that rank r owns, k_r = entries that its update changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dgc.core.agreement import require_agreement
from dgc.core.errors import LayoutError, TransportError
from dgc.core.stats import Stats, StepStats
from dgc.torch.zero.buckets import BucketViews
from dgc.torch.zero.changes import Changes, ChangeTracker, bits_dtype, bits_of
from dgc.torch.zero.ranks import Ranks
from dgc.torch.zero.travel import UNKNOWN, choose_travel, read_entries, write_entries

_FAILED = -2


@dataclass(frozen=True)
class Shard:
    """One owner's parameters, in the order of its flat space."""

    parameters: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    """Their places among all parameters."""

    @property
    def numel(self) -> int:
        """Elements, n_r."""
        return sum(p.numel() for p in self.parameters)

    @property
    def starts(self) -> np.ndarray:
        """(parameters + 1,) int64: where each begins in the flat space."""
        return np.cumsum([0] + [p.numel() for p in self.parameters])


class Sharing:
    """Publishes updates among the ranks.

    Each step costs an allreduce of 4 bytes and an allgather of 24, in which every rank says how many entries it
    changed; all ranks then derive the same traffic from the same numbers.

    Attributes:
        stats: bytes given to and got from collectives; ``dense_bytes`` is what broadcasts of this rank's shard take,
            ``entries_sent`` are the entries that its updates changed as far as they were counted.
    """

    def __init__(self, ranks: Ranks, *, sparse: bool) -> None:
        """Publish nothing yet: :meth:`use` comes first.

        Args:
            ranks: who takes part.
            sparse: whether to look for updates that changed few entries.
        """
        self._ranks = ranks
        self._sparse = sparse
        self.stats = Stats()
        self._names: list[str] = []
        self._shards: list[Shard] = []
        self._views: BucketViews | None = None
        self._mask: list[bool] = []
        self._digest = 0
        self._tracker: ChangeTracker | None = None

    def use(self, shards: Sequence[Shard], names: Sequence[str], views: BucketViews | None) -> None:
        """Take over a partition; called again whenever it, or trainability, has changed.

        Args:
            shards: by owner.
            names: of all parameters, for errors.
            views: the flat buffers, if parameters are kept in such.
        """
        same = [s.numbers for s in shards] == [s.numbers for s in self._shards]
        self._shards, self._names, self._views = list(shards), list(names), views
        parameters = sorted((n, p) for shard in shards for n, p in zip(shard.numbers, shard.parameters, strict=True))
        self._mask = [p.requires_grad for _, p in parameters]
        text = json.dumps([self._mask, [s.numbers for s in shards]])
        self._digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        if not same:
            own = self._shards[self._ranks.rank].parameters
            self._tracker = ChangeTracker(own) if self._sparse and self._ranks.size > 1 else None

    def begin(self) -> None:
        """Tell the other ranks that this one takes a step; :meth:`publish` or :meth:`fail` must follow."""
        self._ranks.call_roll()

    def before_update(self, *, gradients_known: bool) -> None:
        """Get ready to see what the update changes."""
        if self._tracker is not None:
            self._tracker.before_update(gradients_known=gradients_known)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, which are on their way to :meth:`publish`, that this rank's update failed."""
        if self._ranks.size > 1:
            # If they cannot be told, this rank's own error still matters more.
            with contextlib.suppress(TransportError):
                self._ranks.check_roll()
                self._ranks.gather_status([_FAILED, 0, self._digest])
                self._ranks.explain_failure(error)

    @torch.no_grad()
    def publish(self) -> None:
        """Send this rank's new values and take in those of all others.

        Raises:
            RemoteError: another rank's update failed.
            LayoutError: the ranks disagree about which parameters are trainable.
            TransportError: a collective failed, for instance because a rank has joined.
        """
        if self._ranks.size == 1:
            return
        changes = self._tracker.after_update() if self._tracker is not None else None
        self._ranks.check_roll()
        own = self._shards[self._ranks.rank]
        frozen_moved = any(not p.requires_grad and p.grad is not None for p in own.parameters)
        table = self._ranks.gather_status(
            [UNKNOWN if changes is None else len(changes.positions), int(frozen_moved), self._digest]
        )
        counts = table[:, 0].tolist()
        if _FAILED in counts:
            self._ranks.explain_failure(None)
        if (table[:, 2] != self._digest).any():
            self._explain_difference()
        step = StepStats(bytes_sent=28, bytes_received=24 * (self._ranks.size - 1) + 4)
        itemsize = self._itemsize()
        travel = choose_travel(counts, [s.numel for s in self._shards], itemsize)
        with step.timed("exchange"):
            whole = list(self._whole(travel.dense, table[:, 1].astype(bool).tolist()))
            wait = self._ranks.broadcast(whole)
            if travel.sparse:
                self._share_entries(travel.sparse, travel.row_bytes, counts, changes, bits_dtype(itemsize), step)
            wait()
        for _, owner, tensor in whole:
            nbytes = tensor.numel() * tensor.element_size()
            if owner == self._ranks.rank:
                step.bytes_sent += nbytes
            else:
                step.bytes_received += nbytes
        step.dense_bytes = own.numel * itemsize
        step.sparse_elements = own.numel
        step.entries_sent = own.numel if changes is None else len(changes.positions)
        self.stats.record(step, refused=False)

    def trainability_changed(self) -> bool:
        """Whether a parameter was frozen or unfrozen since :meth:`use`."""
        found = {n: p.requires_grad for s in self._shards for n, p in zip(s.numbers, s.parameters, strict=True)}
        return any(self._mask[n] != now for n, now in found.items())

    def _itemsize(self) -> int:
        # All parameters are of one type, and a rank may own none.
        return next((p.element_size() for s in self._shards for p in s.parameters), 4)

    def _whole(self, owners: Sequence[int], frozen_moved: Sequence[bool]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """What must be broadcast, in the same order on every rank.

        A frozen parameter stays what it is, unless it still has an old gradient: then torch's optimizers update it.
        """
        for owner in owners:
            if self._views is not None:
                for i, bucket in enumerate(self._views.buckets[owner]):
                    yield f"bucket.{owner}.{i}.{bucket.numel()}", owner, bucket
            shard = self._shards[owner]
            for number, p in zip(shard.numbers, shard.parameters, strict=True):
                wanted = p.requires_grad or frozen_moved[owner]
                if p.numel() and wanted and not (self._views is not None and p in self._views):
                    yield f"parameter.{number}", owner, p

    def _share_entries(
        self,
        owners: Sequence[int],
        row_bytes: int,
        counts: Sequence[int],
        changes: Changes | None,
        bits: np.dtype,
        step: StepStats,
    ) -> None:
        rank, size = self._ranks.rank, self._ranks.size
        row, rows = np.zeros(row_bytes, np.uint8), np.empty((size, row_bytes), np.uint8)
        if rank in owners and changes is not None:
            write_entries(changes.positions, changes.values, self._shards[rank].numel, row)
        self._ranks.transport.allgather(row, rows)
        step.bytes_sent += row_bytes
        step.bytes_received += row_bytes * (size - 1)
        for owner in owners:
            if owner != rank:
                shard = self._shards[owner]
                positions, values = read_entries(rows[owner], shard.numel, counts[owner], bits)
                _write_values(shard, positions, values)

    def _explain_difference(self) -> None:
        described = dict(zip(self._names, ("trainable" if m else "frozen" for m in self._mask), strict=True))
        require_agreement(
            self._ranks.transport, described, "trainable parameters", LayoutError, "Freeze the same ones on every rank."
        )
        raise LayoutError("the ranks hold different groups of parameters; call add_param_group on every rank")


def _write_values(shard: Shard, positions: np.ndarray, values: np.ndarray) -> None:
    """Set the entries of an owner's parameters, given by bits."""
    starts = shard.starts
    bounds = np.searchsorted(positions, starts)
    for i, p in enumerate(shard.parameters):
        inside = slice(bounds[i], bounds[i + 1])
        if inside.start == inside.stop:
            continue
        bits = bits_of(p)
        places = torch.from_numpy(positions[inside] - starts[i]).to(bits.device)
        bits[places] = torch.from_numpy(values[inside].copy()).to(bits.device)
        if not p.is_contiguous():
            p.detach().copy_(bits.view(p.dtype).view(p.shape))
