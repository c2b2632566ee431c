"""After the update: every owner's new parameter values reach all ranks, as entries or whole, bit for bit.

P = number of ranks, n_r = elements that rank r owns, k_r = entries that its update changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dgc.core.exchange.records import Stats, StepStats
from dgc.errors import LayoutError, TransportError
from dgc.torch.zero.delta import (
    UNKNOWN,
    Changes,
    ChangeTracker,
    ReplicaWatch,
    bits_dtype,
    bits_of,
    choose_travel,
    read_entries,
    values_digest,
    write_entries,
)
from dgc.torch.zero.groups import described_options, kind_of
from dgc.torch.zero.memory import BucketViews
from dgc.torch.zero.ranks import Ranks
from dgc.transport.agreement import require_agreement

_FAILED = -2
"""Count of an owner whose update failed."""

_FROZEN_MOVED, _BEHIND, _SUSPECT = 1, 2, 4
"""Flags of a rank: frozen parameters that it owns may have changed; values of its last step may not have reached
everybody; its parameters may be others than those of the other ranks."""

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

    A step that does not reach its end leaves the ranks with different values: some have updated their share, and nobody
    has got it. So the next one that does sends all parameters whole. So does a step that finds the ranks different
    although nothing failed: a digest of all parameters is compared in the first step, after parameters were changed
    between two steps, and now and then (:class:`~dgc.torch.zero.delta.ReplicaWatch`).

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
        self._shards: list[Shard] = []
        self._views: BucketViews | None = None
        self._parameters: list[torch.Tensor] = []
        self._mask: list[bool] = []
        self._types: list[torch.dtype] = []
        self._layout: dict[str, str] = {}
        self._layout_text = ""
        self._options: dict[str, Any] = {}
        self._outcome: dict[str, Any] = {}
        self._digest = 0
        self._tracker: ChangeTracker | None = None
        self._changes: Changes | None = None
        self._in_step = False
        self._behind = False
        self._watch = ReplicaWatch()
        self._doubt: int | None = None  # the digest of the parameters before a step that compares them

    def use(self, shards: Sequence[Shard], names: Sequence[str], views: BucketViews | None) -> None:
        """Take over a partition; called again whenever it, or trainability, has changed.

        Args:
            shards: by owner.
            names: of all parameters, for errors.
            views: the flat buffers, if parameters are kept in such.
        """
        same = [s.numbers for s in shards] == [s.numbers for s in self._shards]
        self._shards, self._views = list(shards), views
        numbered = {n: p for shard in shards for n, p in zip(shard.numbers, shard.parameters, strict=True)}
        self._parameters = [numbered[n] for n in range(len(numbered))]
        self._mask = [p.requires_grad for p in self._parameters]
        self._types = [p.dtype for p in self._parameters]
        self._layout = {name: kind_of(p) for name, p in zip(names, self._parameters, strict=True)}
        self._layout_text = json.dumps([self._layout, [s.numbers for s in shards]])
        if not same:
            own = self._shards[self._ranks.rank].parameters
            self._tracker = ChangeTracker(own) if self._sparse and self._ranks.size > 1 else None

    def continue_from(self, other: Sharing) -> None:
        """Take over from another one for the same parameters, whose last step may not have reached its end."""
        self._in_step = other._in_step

    def begin(self) -> None:
        """Tell the other ranks that this one takes a step; :meth:`publish` or :meth:`fail` must follow."""
        self._in_step, self._behind = True, self._in_step
        self._ranks.call_roll()

    def before_update(
        self, groups: Sequence[Mapping[str, Any]], *, gradients_known: bool, state_loaded: bool = False
    ) -> None:
        """Get ready to see what the update changes.

        Args:
            groups: with the options of this update, which must be the same on all ranks.
            gradients_known: False when a closure is going to compute them.
            state_loaded: whether a state was loaded since the last step, which must be the same on all ranks, too.
        """
        self._options = described_options(groups) | {"state loaded since the last step": state_loaded}
        self._outcome = {}
        self._digest = self._digest_of_options()
        suspect = self._ranks.size > 1 and self._watch.suspects(self._parameters)
        self._doubt = values_digest(self._parameters) if suspect else None
        if self._tracker is not None:
            self._tracker.before_update(gradients_known=gradients_known)

    def after_update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find what the update changed, and put parameters back that it has moved out of their buckets.

        Args:
            groups: with the options as the update has left them, which must be the same on all ranks as well.
        """
        found = described_options(groups)
        self._outcome = {k: v for k, v in found.items() if k not in self._options or v != self._options[k]}
        if self._outcome:
            self._digest = self._digest_of_options()
        if self._views is not None:
            self._views.bring_back()
        self._changes = self._tracker.after_update() if self._tracker is not None else None

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
        """Send this rank's new values, those that :meth:`after_update` found, and take in those of all others.

        Raises:
            RemoteError: another rank's update failed.
            LayoutError: the ranks disagree about options or about which parameters are trainable.
            TransportError: a collective failed, for instance because a rank has joined.
        """
        if self._ranks.size > 1:
            self._exchange()
            self._watch.remember(self._parameters)
        self._in_step = False

    def _exchange(self) -> None:
        changes, self._changes = self._changes, None
        self._ranks.check_roll()
        own = self._shards[self._ranks.rank]
        frozen_moved = any(not p.requires_grad and p.grad is not None for p in own.parameters)
        flags = _FROZEN_MOVED * frozen_moved + _BEHIND * self._behind + _SUSPECT * (self._doubt is not None)
        table = self._ranks.gather_status([UNKNOWN if changes is None else len(changes.positions), flags, self._digest])
        counts = table[:, 0].tolist()
        if _FAILED in counts:
            self._ranks.explain_failure(None)
        if (table[:, 2] != self._digest).any():
            self._explain_difference()
        with_frozen = (table[:, 1] & _FROZEN_MOVED).astype(bool).tolist()
        step = StepStats(bytes_sent=28, bytes_received=24 * (self._ranks.size - 1) + 4)
        suspects = (table[:, 1] & _SUSPECT).astype(bool)
        # One rank's flag is enough: what it missed may be anybody's.
        if (table[:, 1] & _BEHIND).any() or (suspects.all() and self._differ(self._doubt or 0, step)):
            counts, with_frozen, changes = [UNKNOWN] * len(counts), [True] * len(counts), None
            suspects[:] = False
        itemsize = self._itemsize()
        travel = choose_travel(counts, [s.numel for s in self._shards], itemsize)
        with step.timed("exchange"):
            whole = list(self._whole(travel.dense, with_frozen))
            wait = self._ranks.broadcast(whole)
            if travel.sparse:
                self._share_entries(travel.sparse, travel.row_bytes, counts, changes, bits_dtype(itemsize), step)
            wait()
            self._count(whole, step)
            # Where some ranks alone suspect, the others have not kept what they had before the update.
            complete = all(owner in travel.dense or not shard.numel for owner, shard in enumerate(self._shards))
            complete = complete and (all(self._mask) or all(with_frozen))
            if suspects.any() and not suspects.all() and not complete:
                if self._differ(values_digest(self._parameters), step):
                    everyone = range(self._ranks.size)
                    whole = list(self._whole(everyone, [True] * self._ranks.size))
                    self._ranks.broadcast(whole)()
                    self._count(whole, step)
        step.dense_bytes = own.numel * itemsize
        step.sparse_elements = own.numel
        step.entries_sent = own.numel if changes is None else len(changes.positions)
        self.stats.record(step, refused=False)

    def _differ(self, digest: int, step: StepStats) -> bool:
        """Whether the ranks' digests differ; says so to the user. Collective."""
        digests = self._ranks.gather_status([digest])
        step.bytes_sent += 8
        step.bytes_received += 8 * (self._ranks.size - 1)
        if (digests == digests[0]).all():
            return False
        warnings.warn(_DIFFERENT, stacklevel=8)
        return True

    def _count(self, whole: Sequence[tuple[str, int, torch.Tensor]], step: StepStats) -> None:
        for _, owner, tensor in whole:
            nbytes = tensor.numel() * tensor.element_size()
            if owner == self._ranks.rank:
                step.bytes_sent += nbytes
            else:
                step.bytes_received += nbytes

    def trainability_changed(self) -> bool:
        """Whether a parameter was frozen or unfrozen since :meth:`use`."""
        return [p.requires_grad for p in self._parameters] != self._mask

    def types_changed(self) -> bool:
        """Whether a parameter has got another type since :meth:`use` (``model.double()``)."""
        return [p.dtype for p in self._parameters] != self._types

    def _digest_of_options(self) -> int:
        text = self._layout_text + json.dumps([self._options, self._outcome])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def _itemsize(self) -> int:
        # All parameters are of one type, and a rank may own none.
        return next((p.element_size() for s in self._shards for p in s.parameters), 4)

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
        described = {**self._layout, **self._options}
        what = "parameters and options of the sharded optimizer"
        advice = f"{_ADVICE} {_UNSHARDABLE}" if self._outcome else _ADVICE
        require_agreement(self._ranks.transport, described, what, LayoutError, advice)
        what = "options after the update of the sharded optimizer"
        require_agreement(self._ranks.transport, self._outcome, what, LayoutError, _UNSHARDABLE)
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
