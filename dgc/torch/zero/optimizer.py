"""``ZeroRedundancyOptimizer``: any torch optimizer with its state sharded over Horovod's ranks."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from dgc.core.exchange.records import Stats
from dgc.core.transport import Transport
from dgc.errors import ConfigError, LayoutError
from dgc.torch.engine.step.untraced import untraced
from dgc.torch.zero.groups import (
    Group,
    checked_class,
    checked_groups,
    checked_transport,
    chosen_set,
    description,
    local_group,
    names_of,
    parameters_of,
    require_no_common_norm,
    require_shardable,
    tensor_of,
)
from dgc.torch.zero.memory import BucketViews, Partition
from dgc.torch.zero.ranks import Ranks
from dgc.torch.zero.sharing import Sharing
from dgc.torch.zero.state import ShardedState
from dgc.torch.zero.wrapped import OwnedGroups, averaging, require_hooks, require_same_set
from dgc.transport.agreement import agree_or_raise


class ZeroRedundancyOptimizer(ShardedState):
    """Any torch optimizer, of which every rank holds and steps its share of the parameters.

    Each rank keeps the optimizer state of about 1/P of the elements; after its update it sends the new values to the
    others: only the changed entries where that is fewer bytes (after a compressed gradient exchange, say), all of them
    otherwise. All ranks hold the same bits after every step, also when they started with different ones: then every
    parameter becomes its owner's, with a warning, as it does when some ranks alone changed it between two steps.

    Gradients must have been averaged before ``step()``: wrap this optimizer in Horovod's or this package's
    ``DistributedOptimizer``, or average them yourself.

    ``param_groups`` hold all parameters, so schedulers, ``zero_grad`` and the like work as with any optimizer. All
    ranks must call the constructor, ``step``, ``add_param_group`` and ``consolidate_state_dict`` together. After a step
    that failed, the next one that succeeds sends all parameters whole, and all ranks hold the same bits again.

    It cannot be copied or pickled; save its ``state_dict()``.

    Attributes:
        optim: the local optimizer of this rank's share.
        optimizer_class: its class.
        stats: bytes that the parameters cost, in the last step and in total. ``dense_bytes`` is what broadcasts of this
            rank's shard take, ``entries_sent`` are the entries that its updates changed as far as they were counted.

    Source: Rajbhandari et al. 2020, arXiv 1910.02054, stage 1; interface of torch.distributed.optim.
    """

    stats: Stats
    _bucket_view: bool
    _sparse: bool
    _local_defaults: dict[str, Any]
    _unfinished: bool

    _ready = False
    _shards_updates = True  # SGD without momentum may be left to a compressor, which updates all ranks' shares alike

    def __init__(
        self,
        params: object,
        optimizer_class: type[Optimizer] | None = None,
        group: object = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        process_group: object = None,
        process_set: object = None,
        transport: str | Transport = "auto",
        sparse_parameters: bool = True,
        **defaults: object,
    ) -> None:
        """Shard an optimizer. Collective over the process set.

        Args:
            params: parameters, (name, parameter) pairs or group dicts, the same on every rank.
            optimizer_class: class of the local optimizers, such as ``torch.optim.Adam``.
            group: a ``hvd.ProcessSet``; None means all ranks.
            parameters_as_bucket_view: keep each rank's parameters in one flat buffer per device (``p.data`` becomes a
                view of it), so that a dense update is sent in one broadcast per rank instead of one per parameter.
            overlap_with_ddp: must be False.
            process_group: another name for ``group``.
            process_set: another name for ``group``.
            transport: what carries sparse updates: "auto", "mpi", "horovod" or a transport.
            sparse_parameters: False always sends whole parameters, and saves the copy of the share that finding
                changed entries takes.
            **defaults: options of the local optimizers.

        Raises:
            TypeError: ``params``, ``optimizer_class`` or ``group`` is something else than described.
            ConfigError: (a ValueError) ``overlap_with_ddp=True``, a class that cannot be sharded, no such transport, or
                Horovod is not ready.
            LayoutError: (a ValueError) no parameters; sparse or complex ones, of different types, listed twice or in
                the same memory; or parameters or options differ between ranks.
            RemoteError: another rank met one of these.
            TransportError: a rank has joined (``hvd.join``).
        """
        origin = params.owner() if isinstance(params, OwnedGroups) and optimizer_class is None else None
        if origin is None:
            ranks = Ranks(lambda: chosen_set(group, process_group, process_set))
        else:
            optimizer_class, ranks, defaults = origin.optimizer_class, origin._ranks, origin._local_defaults
            parameters_as_bucket_view, sparse_parameters = origin._bucket_view, origin._sparse
            ranks.begin_count()
            ranks.end_count()
        self.stats = Stats()
        self._ranks = ranks
        self._partition = Partition(ranks.size)
        self._views: BucketViews | None = None
        self._bucket_view, self._sparse = bool(parameters_as_bucket_view), bool(sparse_parameters)
        self._local_defaults = dict(defaults)
        self._consolidated = None
        self._state_loaded = False
        self._unfinished = False

        def build() -> dict[str, Any]:
            if overlap_with_ddp:
                raise ConfigError(
                    "overlap_with_ddp=True needs torch's DistributedDataParallel, which is not used here; leave it "
                    "out: Horovod's DistributedOptimizer averages gradients during the backward pass"
                )
            self.optimizer_class = checked_class(optimizer_class)
            groups = checked_groups(params) if origin is None else list(origin.param_groups)
            Optimizer.__init__(self, groups, dict(defaults))
            for g in self.param_groups:
                self._partition.add_group([p.numel() for p in g["params"]])
            self.optim = self.optimizer_class(self._local_groups(), **defaults)
            require_no_common_norm(self.optim)
            return {
                "optimizer_class": self.optimizer_class.__name__,
                "parameters_as_bucket_view": self._bucket_view,
                "sparse_parameters": self._sparse,
                "transport": checked_transport(transport, ranks.rank, ranks.size) if origin is None else None,
                **description(self.param_groups, defaults),
            }

        agree_or_raise(
            ranks.channel,
            build,
            "parameters and options of the sharded optimizer",
            LayoutError,
            "Build the same model and the same optimizer on every rank.",
        )
        if origin is None:
            ranks.use_transport(transport)
        else:  # keep what was loaded, or left undone by a step that failed, before Horovod rebuilt the optimizer
            self.optim.state.update(origin.optim.state)
            self._state_loaded, self._unfinished = origin._state_loaded, origin._unfinished
        self.defaults = {**self.optim.defaults, **self.defaults}
        self._pull_options()
        owned = OwnedGroups(self.param_groups)
        owned.owner = weakref.ref(self)
        self.param_groups = owned
        self._rebuild_shards()
        self._ready = True

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: object) -> Any:
        """Update this rank's share and bring all new values to all ranks. Collective.

        Args:
            closure: recomputes the loss; evaluated once. Under Horovod's ``DistributedOptimizer`` the gradients that
                it computes are averaged before the update: call ``step(closure)`` in ``skip_synchronize()`` there.
            **kwargs: passed on to the local optimizer's ``step``.

        Returns:
            What the local optimizer's ``step`` returned.

        Raises:
            ConfigError: the gradients are averaged over another process set than the one of this optimizer.
            LayoutError: the ranks disagree about which parameters are trainable or about the groups' options, their
                learning rates for instance; or ``param_groups`` were changed by hand.
            RemoteError: the update failed on another rank.
            TransportError: the new values could not be sent, for instance because a rank has joined (``hvd.join``).
        """
        arguments = () if closure is None else (averaging(self, closure),)
        with self._around_update(gradients_known=closure is None):
            return self.optim.step(*arguments, **kwargs)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, which are given to the ranks with the least elements; old ones keep their owners.

        Call it on all ranks; the next ``step()`` finds out if one has not.

        Raises:
            TypeError: not a dict, or no tensors in it.
            LayoutError: sparse, complex, of another type than the other parameters, or in the same memory.
            ConfigError: Horovod's ``DistributedOptimizer`` has been wrapped around, and would not average the new ones.
        """
        if not self._ready:  # torch's constructor calls this for every group
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}")
        checked_groups([param_group])
        require_shardable([*parameters_of(self.param_groups), *param_group["params"]])
        require_hooks(self, [tensor_of(item) for item in param_group["params"]])
        self._require_known_parameters()
        number = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        partition = copy.deepcopy(self._partition)
        owners = partition.add_group([p.numel() for p in group["params"]])
        try:
            self.optim.add_param_group(local_group(group, owners, self._ranks.rank))
            require_no_common_norm(self.optim)
        except Exception:
            del self.param_groups[number:], self.optim.param_groups[number:]
            raise
        self._partition = partition
        self._pull_options()
        self._rebuild_shards()

    def partition_parameters(self) -> list[list[Group]]:
        """By rank, the parameter groups that it owns: for each group a dict of its options and parameters."""
        return [self._local_groups(rank) for rank in range(self._ranks.size)]

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refuse torch's ``Join``, which would let the other ranks step without this one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "torch.distributed's Join works on process groups of torch, and this optimizer shards over Horovod's "
            "ranks: leave it out, and let every rank make the same number of steps (a rank without data steps with "
            "zero gradients)"
        )

    @contextlib.contextmanager
    def _around_update(
        self, compute: Callable[[], None] | None = None, *, gradients_known: bool = True
    ) -> Iterator[None]:
        """The context of a local update, which all ranks enter.

        Args:
            compute: computes the gradients, if that is not done yet.
            gradients_known: whether the update begins with all gradients.
        """
        unfinished, self._unfinished = self._unfinished, True  # whether the last step may not have reached its end
        self._ranks.begin_count()
        try:
            if compute is not None:
                compute()
            self._before_update(gradients_known=gradients_known)
            yield
            self._pull_options()
            self._sharing.after_update(self.param_groups)
        except Exception as error:
            self._sharing.fail(error)
            raise
        step = self._sharing.publish(unfinished=unfinished)
        if step is not None:
            self.stats.record(step, refused=False)
        self._state_loaded = self._unfinished = False

    def _before_update(self, *, gradients_known: bool) -> None:
        require_same_set(self, self._ranks.members)
        self._require_known_parameters()
        types, trainable = _kinds(self.param_groups)
        if types != self._kinds[0]:
            require_shardable(parameters_of(self.param_groups))
        if trainable != self._kinds[1]:
            warnings.warn(
                "parameters were frozen or unfrozen since the last step; the sharded optimizer rebuilds its buckets",
                stacklevel=6,
            )
        if (types, trainable) != self._kinds or (self._views is not None and not self._views.intact()):
            self._rebuild_shards()
        self._push_options()
        self._sharing.before_update(self.param_groups, gradients_known=gradients_known, state_loaded=self._state_loaded)

    def _local_groups(self, rank: int | None = None) -> list[Group]:
        rank = self._ranks.rank if rank is None else rank
        return [
            local_group(group, owners, rank)
            for group, owners in zip(self.param_groups, self._partition.owners, strict=True)
        ]

    def _rebuild_shards(self) -> None:
        self._known = [list(map(id, group["params"])) for group in self.param_groups]
        self._kinds = _kinds(self.param_groups)
        parameters = parameters_of(self.param_groups)
        shards = [[parameters[n] for members in groups for n in members] for groups in self._partition.indices()]
        if self._bucket_view:
            self._views = self._views or BucketViews()
            self._views.build(shards)
        named = dict(zip(names_of(self.param_groups), parameters, strict=True))
        self._sharing = Sharing(self._ranks, named, shards, self._views, sparse=self._sparse)


def _kinds(groups: Sequence[Group]) -> tuple[list[torch.dtype], list[bool]]:
    """The parameters' types, and whether each is trainable."""
    parameters = parameters_of(groups)
    return [p.dtype for p in parameters], [p.requires_grad for p in parameters]
