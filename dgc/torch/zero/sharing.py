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
    choose_routes,
    read_entries,
    values_digest,
    write_changes,
    write_entries,
)
from dgc.torch.zero.groups import described_options, kind_of
from dgc.torch.zero.memory import BucketViews
from dgc.torch.zero.ranks import COUNT_BYTES, Ranks
from dgc.transport.agreement import require_agreement, tell_error

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


class Sharing:
    """Publishes the updates of one partition among the ranks.

    Each step costs an allreduce of 4 bytes and an allgather of 32: every rank's number of changed entries, whether
    frozen parameters changed too, a digest of the options, and one of all parameters before the update. All ranks
    derive the same traffic from them. Where the parameters differed, or a rank's last step did not reach its end, all
    of them are sent whole.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Mapping[str, torch.Tensor],
        shards: Sequence[Sequence[torch.Tensor]],
        views: BucketViews | None,
        *,
        sparse: bool,
    ) -> None:
        """Take all parameters by name, and by owner, and the flat buffers if there are any.

        ``sparse`` is whether to look for updates that changed few entries.
        """
        self._ranks = ranks
        self._parameters = list(parameters.values())
        self._layout = {name: kind_of(p) for name, p in parameters.items()}
        self._shards = shards
        self._views = views
        self._tracker = ChangeTracker(shards[ranks.rank]) if sparse and ranks.size > 1 else None
        # Of the step in progress, for the ranks to compare: parameters and options before the update, the options
        # that the update has set, the digest of all parameters before it; and what it changed, None if unknown.
        self._described: dict[str, Any] = {}
        self._outcome: dict[str, Any] = {}
        self._values = 0
        self._changes: Changes | None = None

    def before_update(self, groups: Sequence[Mapping[str, Any]], *, gradients_known: bool, state_loaded: bool) -> None:
        """Get ready to see what the update changes.

        The options in ``groups``, and whether a state was loaded since the last step, must be the same on all ranks.
        Gradients are not known when a closure is going to compute them.
        """
        loaded = {"state loaded since the last step": state_loaded}
        self._described = {**self._layout, **described_options(groups), **loaded}
        self._values = values_digest(self._parameters) if self._ranks.size > 1 else 0
        if self._tracker is not None:
            self._tracker.before_update(gradients_known=gradients_known)

    def after_update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find what the update changed, options included, and move parameters back into their buckets."""
        before = self._described
        self._outcome = {k: v for k, v in described_options(groups).items() if k not in before or v != before[k]}
        if self._views is not None:
            self._views.bring_back()
        self._changes = self._tracker.after_update() if self._tracker is not None else None

    def fail(self, error: Exception) -> None:
        """Raise this rank's failure on the other ranks, which are on their way to :meth:`publish`."""
        if self._ranks.size > 1:
            # Where that fails, this rank's own error matters more.
            with contextlib.suppress(TransportError):
                self._ranks.end_count()
                self._ranks.gather_status([_FAILED, 0, 0, 0])
                tell_error(self._ranks.transport, error)

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
        rank, changes = self._ranks.rank, self._changes
        sizes = [sum(p.numel() for p in shard) for shard in self._shards]
        count = _UNFINISHED if unfinished else UNKNOWN if changes is None else len(changes.positions)
        frozen_moved = any(not p.requires_grad and p.grad is not None for p in self._shards[rank])
        self._ranks.end_count()
        text = json.dumps([self._described, self._outcome]).encode()
        options_digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        table = self._ranks.gather_status([count, frozen_moved, options_digest, self._values])
        counts, with_frozen, options, values = table.T.tolist()
        if _FAILED in counts:
            require_agreement(self._ranks.transport, {}, "the ranks' steps")
        if len(set(options)) > 1:
            self._explain_difference()
        different = _UNFINISHED not in counts and len(set(values)) > 1
        if different:
            warnings.warn(_DIFFERENT, stacklevel=7)
        if different or _UNFINISHED in counts:
            counts, with_frozen, changes = [UNKNOWN] * len(counts), [True] * len(counts), None
        itemsize = self._parameters[0].element_size()  # all are of one type
        routes = choose_routes(counts, sizes, itemsize)
        others = self._ranks.size - 1
        step = StepStats(
            bytes_sent=COUNT_BYTES + table[0].nbytes + routes.row_bytes,
            bytes_received=COUNT_BYTES + (table[0].nbytes + routes.row_bytes) * others,
            dense_bytes=sizes[rank] * itemsize,
            sparse_elements=sizes[rank],
            entries_sent=sizes[rank] if changes is None else len(changes.positions),
        )
        since = time.perf_counter()
        whole = list(self._whole(routes.dense, with_frozen))
        wait = self._ranks.broadcast(whole)
        if routes.sparse:
            self._share_entries(routes, counts, sizes, changes, itemsize)
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
            for i, p in enumerate(self._shards[owner]):
                wanted = p.requires_grad or with_frozen[owner]
                if p.numel() and wanted and not (self._views is not None and p in self._views):
                    yield f"parameter.{owner}.{i}.{p.numel()}", owner, p

    def _share_entries(
        self, routes: Routes, counts: Sequence[int], sizes: Sequence[int], changes: Changes | None, itemsize: int
    ) -> None:
        rank = self._ranks.rank
        row, rows = np.zeros(routes.row_bytes, np.uint8), np.empty((self._ranks.size, routes.row_bytes), np.uint8)
        if rank in routes.sparse and changes is not None:
            write_entries(changes, sizes[rank], row)
        self._ranks.transport.allgather(row, rows)
        for owner in routes.sparse:
            if owner != rank:
                write_changes(self._shards[owner], read_entries(rows[owner], sizes[owner], counts[owner], itemsize))

    def _explain_difference(self) -> None:
        transport = self._ranks.transport
        what = "parameters and options of the sharded optimizer"
        advice = f"{_ADVICE} {_UNSHARDABLE}" if self._outcome else _ADVICE
        require_agreement(transport, self._described, what, LayoutError, advice)
        what = "options after the update of the sharded optimizer"
        require_agreement(transport, self._outcome, what, LayoutError, _UNSHARDABLE)
