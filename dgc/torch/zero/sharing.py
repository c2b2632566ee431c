"""After the update: every owner's new parameter values reach all ranks, as entries or whole, bit for bit.

P = number of ranks, n_r = elements that rank r owns, k_r = entries that its update changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dgc.core.exchange.records import StepStats
from dgc.errors import LayoutError, TransportError
from dgc.torch.zero.delta import (
    UNKNOWN,
    Changes,
    ChangeTracker,
    Routes,
    Shard,
    bits_dtype,
    choose_routes,
    read_entries,
    values_digest,
    write_entries,
)
from dgc.torch.zero.groups import described_options, kind_of
from dgc.torch.zero.memory import BucketViews
from dgc.torch.zero.ranks import COUNT_BYTES, Ranks
from dgc.transport.agreement import require_agreement

_FAILED = -2
"""Count of an owner whose update failed."""

_UNFINISHED = -3
"""Count of an owner whose last step may not have reached all ranks."""

_ADVICE = (
    "Freeze the same parameters and set the same options, learning rates above all, on every rank: give schedulers "
    "such as ReduceLROnPlateau a value averaged over the ranks (hvd.allreduce), and load a state on every rank, where "
    "each takes its share. The next step() that succeeds makes all ranks' parameters equal again."
)

_UNSHARDABLE = (
    "An optimizer whose update itself sets an option from what one rank alone has, its share of the parameters or its "
    "own loss, cannot be sharded: use it without ZeroRedundancyOptimizer."
)

_DIFFERENT = (
    "the ranks held different parameters when this step began; all of them hold those of each parameter's owner now. "
    "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step and after loading or "
    "changing parameters on one rank: otherwise a model that was put together from several ranks is trained"
)


@dataclass
class _Update:
    """One step: what the ranks compare of it, and what it changed.

    Attributes:
        described: parameters and options before the update.
        values: digest of all parameters before the update.
        outcome: the options that the update has set.
        changes: of this rank's shard; None if unknown.
    """

    described: dict[str, Any]
    values: int = 0
    outcome: dict[str, Any] = field(default_factory=dict)
    changes: Changes | None = None

    def digest(self) -> int:
        """64 signed bits of what must be the same on all ranks."""
        text = json.dumps([self.described, self.outcome])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Sharing:
    """Publishes the updates of one partition among the ranks.

    Each step costs an allreduce of 8 bytes and an allgather of 32: every rank's number of changed entries, whether
    frozen parameters changed too, a digest of the options, and one of all parameters before the update. All ranks
    derive the same traffic from them. Where the parameters differed, or a rank's last step did not reach its end, all
    of them are sent whole.
    """

    def __init__(
        self, ranks: Ranks, shards: Sequence[Shard], names: Sequence[str], views: BucketViews | None, *, sparse: bool
    ) -> None:
        """Take shards by owner, the names of all parameters for errors, and the flat buffers if there are any.

        ``sparse`` is whether to look for updates that changed few entries.
        """
        self._ranks = ranks
        self._shards = shards
        self._views = views
        numbered = {n: p for shard in shards for n, p in zip(shard.numbers, shard.parameters, strict=True)}
        self._parameters = [numbered[n] for n in range(len(numbered))]
        self._layout = {name: kind_of(p) for name, p in zip(names, self._parameters, strict=True)}
        self._tracker = ChangeTracker(shards[ranks.rank].parameters) if sparse and ranks.size > 1 else None
        self._update = _Update({})

    def before_update(self, groups: Sequence[Mapping[str, Any]], *, gradients_known: bool, state_loaded: bool) -> None:
        """Get ready to see what the update changes.

        The options in ``groups``, and whether a state was loaded since the last step, must be the same on all ranks.
        Gradients are not known when a closure is going to compute them.
        """
        loaded = {"state loaded since the last step": state_loaded}
        self._update = _Update({**self._layout, **described_options(groups), **loaded})
        if self._ranks.size > 1:
            self._update.values = values_digest(self._parameters)
        if self._tracker is not None:
            self._tracker.before_update(gradients_known=gradients_known)

    def after_update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find what the update changed, options included, and move parameters back into their buckets."""
        before = self._update.described
        found = described_options(groups)
        self._update.outcome = {k: v for k, v in found.items() if k not in before or v != before[k]}
        if self._views is not None:
            self._views.bring_back()
        self._update.changes = self._tracker.after_update() if self._tracker is not None else None

    def fail(self, error: BaseException) -> None:
        """Raise this rank's failure on the other ranks, which are on their way to :meth:`publish`."""
        if self._ranks.size > 1:
            # Where that fails, this rank's own error matters more.
            with contextlib.suppress(TransportError):
                self._ranks.end_count()
                self._ranks.gather_status([_FAILED, 0, 0, 0])
                self._ranks.explain_failure(error)

    @torch.no_grad()
    def publish(self, *, unfinished: bool) -> StepStats | None:
        """Send this rank's new values, those that :meth:`after_update` found, and take in those of all others.

        Args:
            unfinished: whether the last step may not have reached its end.

        Returns:
            What it has cost; None on a single rank.

        Raises:
            RemoteError: another rank's update failed.
            LayoutError: the ranks disagree about options or about which parameters are trainable.
            TransportError: a collective failed, for instance because a rank has joined.
        """
        if self._ranks.size == 1:
            return None
        rank, own, changes = self._ranks.rank, self._shards[self._ranks.rank], self._update.changes
        count = _UNFINISHED if unfinished else UNKNOWN if changes is None else len(changes.positions)
        frozen_moved = any(not p.requires_grad and p.grad is not None for p in own.parameters)
        self._ranks.end_count()
        table = self._ranks.gather_status([count, frozen_moved, self._update.digest(), self._update.values])
        counts, with_frozen, options, values = table.T.tolist()
        if _FAILED in counts:
            self._ranks.explain_failure(None)
        if len(set(options)) > 1:
            self._explain_difference()
        different = _UNFINISHED not in counts and len(set(values)) > 1
        if different:
            warnings.warn(_DIFFERENT, stacklevel=7)
        if different or _UNFINISHED in counts:
            counts, with_frozen, changes = [UNKNOWN] * len(counts), [True] * len(counts), None
        itemsize = self._parameters[0].element_size()  # all are of one type
        routes = choose_routes(counts, [s.numel for s in self._shards], itemsize)
        others = self._ranks.size - 1
        step = StepStats(
            bytes_sent=COUNT_BYTES + table[0].nbytes + routes.row_bytes,
            bytes_received=COUNT_BYTES + (table[0].nbytes + routes.row_bytes) * others,
            dense_bytes=own.numel * itemsize,
            sparse_elements=own.numel,
            entries_sent=own.numel if changes is None else len(changes.positions),
        )
        since = time.perf_counter()
        whole = list(self._whole(routes.dense, with_frozen))
        wait = self._ranks.broadcast(whole)
        if routes.sparse:
            self._share_entries(routes, counts, changes, bits_dtype(itemsize))
        wait()
        step.lap("exchange", since)
        step.bytes_sent += sum(t.nbytes for _, owner, t in whole if owner == rank)
        step.bytes_received += sum(t.nbytes for _, owner, t in whole if owner != rank)
        return step

    def _whole(self, owners: Sequence[int], with_frozen: Sequence[bool]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """What must be broadcast, in the same order on every rank.

        A frozen parameter stays what it is, unless it still has an old gradient (then torch's optimizers update it) or
        was updated in a step that failed.
        """
        for owner in owners:
            if self._views is not None:
                for i, bucket in enumerate(self._views.buckets[owner]):
                    yield f"bucket.{owner}.{i}.{bucket.numel()}", owner, bucket
            shard = self._shards[owner]
            for number, p in zip(shard.numbers, shard.parameters, strict=True):
                wanted = p.requires_grad or with_frozen[owner]
                if p.numel() and wanted and not (self._views is not None and p in self._views):
                    yield f"parameter.{number}", owner, p

    def _share_entries(self, routes: Routes, counts: Sequence[int], changes: Changes | None, bits: np.dtype) -> None:
        rank, size = self._ranks.rank, self._ranks.size
        row, rows = np.zeros(routes.row_bytes, np.uint8), np.empty((size, routes.row_bytes), np.uint8)
        if rank in routes.sparse and changes is not None:
            write_entries(changes, self._shards[rank].numel, row)
        self._ranks.transport.allgather(row, rows)
        for owner in routes.sparse:
            if owner != rank:
                shard = self._shards[owner]
                shard.write(read_entries(rows[owner], shard.numel, counts[owner], bits))

    def _explain_difference(self) -> None:
        update, transport = self._update, self._ranks.transport
        what = "parameters and options of the sharded optimizer"
        advice = f"{_ADVICE} {_UNSHARDABLE}" if update.outcome else _ADVICE
        require_agreement(transport, update.described, what, LayoutError, advice)
        what = "options after the update of the sharded optimizer"
        require_agreement(transport, update.outcome, what, LayoutError, _UNSHARDABLE)
