"""``ZeroRedundancyOptimizer``: any torch optimizer with its state sharded over Horovod's ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from dgc.core.agreement import agree_or_raise
from dgc.core.errors import ConfigError, LayoutError
from dgc.core.stats import Stats
from dgc.core.transport import Transport
from dgc.torch.zero import checkpoints
from dgc.torch.zero.adopted import hand_over_momentum, momentum_is_adopted
from dgc.torch.zero.arguments import checked_class, checked_groups, chosen_set, require_one_dense_type, tensor_of
from dgc.torch.zero.buckets import BucketViews
from dgc.torch.zero.groups import (
    Recipe,
    RecipeGroups,
    copy_options,
    description,
    local_group,
    names_of,
    parameters_of,
)
from dgc.torch.zero.partition import Partition
from dgc.torch.zero.ranks import Ranks
from dgc.torch.zero.sharing import Shard, Sharing

if TYPE_CHECKING:
    from dgc.torch.fuse.seam import StepSeam


class ZeroRedundancyOptimizer(Optimizer):
    """Any torch optimizer, of which every rank holds and steps its share of the parameters.

    Each rank keeps the optimizer state of about 1/P of the elements; after its update it sends the new values to the
    others: only the changed entries where that is fewer bytes (after a compressed gradient exchange, say), all of them
    otherwise. All ranks hold the same bits after every step. Gradients must have been averaged before ``step()``: wrap
    this optimizer in Horovod's or this package's ``DistributedOptimizer``, or average them yourself.

    ``param_groups`` hold all parameters, so schedulers, ``zero_grad`` and the like work as with any optimizer. All
    ranks must call the constructor, ``step``, ``add_param_group`` and ``consolidate_state_dict`` together.

    Attributes:
        optim: the local optimizer of this rank's share.
        optimizer_class: its class.

    Source: Rajbhandari et al. 2020, arXiv 1910.02054, stage 1; interface of torch.distributed.optim.
    """

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer] | None = None,
        group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        process_group: Any = None,
        process_set: Any = None,
        transport: str | Transport = "auto",
        sparse_parameters: bool = True,
        **defaults: Any,
    ) -> None:
        """Shard an optimizer. Collective over the process set.

        Args:
            params: parameters, (name, parameter) pairs or group dicts, the same on every rank.
            optimizer_class: class of the local optimizers, such as ``torch.optim.Adam``.
            group: a ``hvd.ProcessSet``; None means all ranks.
            parameters_as_bucket_view: keep each rank's parameters in one flat buffer per device (``p.data`` becomes a
                view of it), so that a dense update travels in one broadcast per rank instead of one per parameter.
            overlap_with_ddp: must be False.
            process_group: another name for ``group``.
            process_set: another name for ``group``.
            transport: what carries sparse updates: "auto", "mpi", "horovod" or a transport.
            sparse_parameters: False always sends whole parameters, and saves the copy of the share that finding
                changed entries takes.
            **defaults: options of the local optimizers.

        Raises:
            TypeError: ``params`` or ``optimizer_class`` is something else than described.
            ConfigError: (a ValueError) ``overlap_with_ddp=True``, a class that cannot be sharded, Horovod is not ready,
                or options differ between ranks.
            LayoutError: (a ValueError) no parameters, sparse parameters, parameters of different types, or the ranks
                disagree about them.
            RemoteError: another rank met one of these.
        """
        rebuilt = params.recipe if isinstance(params, RecipeGroups) and optimizer_class is None else None
        if rebuilt is None:
            ranks = Ranks(chosen_set(group, process_group, process_set))
        else:
            optimizer_class, ranks, defaults = rebuilt.optimizer_class, rebuilt.ranks, rebuilt.defaults
            parameters_as_bucket_view, sparse_parameters = rebuilt.bucket_view, rebuilt.sparse_parameters
        self._ready = False
        self._ranks = ranks
        self._sharing = Sharing(ranks, sparse=sparse_parameters)
        self._partition = Partition(ranks.size)
        self._views: BucketViews | None = None
        self._bucket_view = parameters_as_bucket_view
        self._consolidated: list[dict[Any, Any]] | None = None

        def build() -> dict[str, Any]:
            if overlap_with_ddp:
                raise ConfigError(
                    "overlap_with_ddp=True needs torch's DistributedDataParallel, which is not used here; leave it "
                    "out: Horovod's DistributedOptimizer averages gradients during the backward pass"
                )
            self.optimizer_class = checked_class(optimizer_class)
            groups = list(params) if rebuilt is not None else checked_groups(params)
            Optimizer.__init__(self, groups, dict(defaults))
            for g in self.param_groups:
                self._partition.add_group([p.numel() for p in g["params"]])
            self.optim = self.optimizer_class(self._local_groups(), **defaults)
            return {
                "optimizer_class": self.optimizer_class.__name__,
                "parameters_as_bucket_view": parameters_as_bucket_view,
                **description(self.param_groups, defaults),
            }

        agree_or_raise(
            ranks.channel,
            build,
            "parameters and options of the sharded optimizer",
            LayoutError,
            "Build the same model and the same optimizer on every rank.",
        )
        if rebuilt is None:
            ranks.use_transport(transport)
        else:
            self._inherit(rebuilt.origin())
        self.optim._is_shard = True  # type: ignore[attr-defined]
        self.defaults = {**self.optim.defaults, **self.defaults}
        self._pull_options()
        recipe = Recipe(
            self.optimizer_class, ranks, parameters_as_bucket_view, sparse_parameters, dict(defaults), weakref.ref(self)
        )
        groups = RecipeGroups(self.param_groups)
        groups.recipe = recipe
        self.param_groups = groups
        self._rebuild_shards()
        self._ready = True

    # -- stepping ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's share and bring everybody's new values to all ranks. Collective.

        Args:
            closure: recomputes the loss; evaluated once. Under Horovod's ``DistributedOptimizer`` the gradients that
                it computes are averaged before the update: call ``step(closure)`` in ``skip_synchronize()`` there.
            **kwargs: passed on to the local optimizer's ``step``.

        Returns:
            What the local optimizer's ``step`` returned.

        Raises:
            ConfigError: the gradients are averaged over another process set than the one of this optimizer.
            LayoutError: the ranks disagree about which parameters are trainable.
            RemoteError: the update failed on another rank.
            TransportError: the new values could not be sent, for instance because a rank has joined (``hvd.join``).
        """
        self._sharing.begin()
        try:
            self._before_update(gradients_known=closure is None)
            if closure is None:
                loss = self.optim.step(**kwargs)
            else:
                loss = self.optim.step(self._averaging(closure), **kwargs)
            self._pull_options()
        except Exception as error:
            self._sharing.fail(error)
            raise
        self._sharing.publish()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are given to the ranks with the least elements; old ones keep their owners.

        Call it on all ranks; the next ``step()`` finds out if one has not.

        Raises:
            TypeError: not a dict, or no tensors in it.
            LayoutError: sparse, or of another type than the other parameters.
        """
        if not getattr(self, "_ready", False):  # torch's constructor calls this for every group
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}")
        checked_groups([param_group])
        require_one_dense_type([*parameters_of(self.param_groups)[:1], *map(tensor_of, param_group["params"])])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        owners = self._partition.add_group([p.numel() for p in group["params"]])
        self.optim.add_param_group(local_group(group, owners, self._ranks.rank))
        self._pull_options()
        self._rebuild_shards()

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """By rank, the parameter groups that it owns: for each group a dict of its options and parameters."""
        return [self._local_groups(rank) for rank in range(self._ranks.size)]

    @property
    def stats(self) -> Stats:
        """Bytes that the parameters cost, of the last step and in total; see :class:`~dgc.core.stats.Stats`."""
        return self._sharing.stats

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all shards to one rank, as copies on the CPU. Collective.

        Args:
            to: the rank, counted within the process set, whose ``state_dict()`` works afterwards.

        Raises:
            ConfigError: no such rank.
            RemoteError: it failed on another rank.
        """
        if not 0 <= to < self._ranks.size:
            raise ConfigError(f"to={to}, but the optimizer's ranks are 0 to {self._ranks.size - 1}")
        self._push_options()
        data, failure = None, None
        try:
            owned = self._partition.indices()[self._ranks.rank]
            entries = checkpoints.full_entries(self.optim.state_dict(), owned)
            data = checkpoints.to_bytes(entries)
        except Exception as error:
            failure = error
        found = self._ranks.collect(data, failure, to)
        self._consolidated = None if found is None else [checkpoints.from_bytes(part) for part in found]

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state as of the last ``consolidate_state_dict``, in torch's ordinary layout.

        It loads into an unsharded optimizer, or into a sharded one on any number of ranks. One key is added:
        ``"partition"``, by rank and group the numbers of the parameters that the rank owns.

        Raises:
            RuntimeError: this rank has no consolidated state.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._ranks.rank} holds only its own share of the optimizer's state: call "
                f"consolidate_state_dict(to={self._ranks.rank}) on all ranks first (and instead of "
                "hvd.broadcast_optimizer_state, load_state_dict on every rank: each takes its share)"
            )
        full = super().state_dict()
        entries: dict[Any, Any] = {}
        for part in self._consolidated:
            entries.update(part)
        full["state"] = dict(sorted(entries.items(), key=lambda item: (not isinstance(item[0], int), item[0])))
        full["partition"] = self._partition.indices()
        return full

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of the unsharded optimizer; every rank takes its share.

        The given dict is neither changed nor kept.

        Raises:
            LayoutError: (a ValueError) it has other groups.
        """
        checkpoints.check_groups(state_dict, [len(g["params"]) for g in self.param_groups])
        owned = self._partition.indices()[self._ranks.rank]
        self.optim.load_state_dict(checkpoints.local_dict(state_dict, owned))
        copy_options(state_dict["param_groups"], self.param_groups)
        self._pull_options()
        if momentum_is_adopted(self):
            hand_over_momentum(self, state_dict)

    def local_state_dict(self) -> dict[str, Any]:
        """The local optimizer's own ``state_dict()``: this rank's share, numbered within it."""
        return self.optim.state_dict()

    @staticmethod
    def rank_local_state_dict(rank: int, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """One rank's share of what :meth:`state_dict` returned, as its local optimizer loads it.

        Args:
            rank: the rank, counted within the process set of the optimizer that was saved.
            state_dict: the whole state.

        Raises:
            LayoutError: (a ValueError) it says nothing about ranks, or there is no such rank.
        """
        partition = state_dict.get("partition")
        if partition is None:
            raise LayoutError("the state dict has no 'partition': no sharded optimizer made it")
        if not 0 <= rank < len(partition):
            raise LayoutError(f"rank is {rank}, but the state dict was made by ranks 0 to {len(partition) - 1}")
        return checkpoints.local_dict(state_dict, partition[rank])

    # -- inside --------------------------------------------------------------------------------------------------

    def _fuse_seam(self) -> StepSeam:
        """This optimizer's step taken apart, for ``fuse_step``."""
        from dgc.torch.fuse.seam import StepSeam

        begun = False

        def before() -> None:
            nonlocal begun
            begun = True
            self._sharing.begin()
            self._before_update(gradients_known=True)

        def after() -> None:
            self._pull_options()
            self._sharing.publish()

        def failed(error: Exception) -> None:
            if not begun:  # the closure failed; the other ranks are on their way to their own update
                self._sharing.begin()
            self._sharing.fail(error)

        return StepSeam(self.optim, type(self.optim), before, after, failed)

    def _before_update(self, *, gradients_known: bool) -> None:
        averaged_over = getattr(self, "process_set", None)  # set by Horovod's DistributedOptimizer
        if averaged_over is not None and averaged_over.process_set_id != self._ranks.members.process_set_id:
            raise ConfigError(
                f"gradients are averaged over {averaged_over}, but the optimizer is sharded over "
                f"{self._ranks.members}; give both the same process set"
            )
        if self._sharing.trainability_changed():
            warnings.warn(
                "parameters were frozen or unfrozen since the last step; the sharded optimizer rebuilds its buckets",
                stacklevel=4,
            )
            self._rebuild_shards()
        elif self._views is not None and not self._views.intact():
            self._rebuild_shards()
        self._push_options()
        self._sharing.before_update(gradients_known=gradients_known)

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, followed by the averaging of its gradients if Horovod's hooks have begun it."""
        if not hasattr(self, "_handles"):
            return closure

        def closure_then_average() -> Any:
            loss = closure()
            if self._handles:
                self.synchronize()
                self._synchronized = False
            return loss

        return closure_then_average

    def _local_groups(self, rank: int | None = None) -> list[dict[str, Any]]:
        rank = self._ranks.rank if rank is None else rank
        return [
            local_group(group, owners, rank)
            for group, owners in zip(self.param_groups, self._partition.owners, strict=True)
        ]

    def _push_options(self) -> None:
        """What schedulers and users set in ``param_groups`` reaches the local optimizer."""
        copy_options(self.param_groups, self.optim.param_groups)

    def _pull_options(self) -> None:
        copy_options(self.optim.param_groups, self.param_groups)

    def _rebuild_shards(self) -> None:
        parameters = parameters_of(self.param_groups)
        shards = []
        for groups in self._partition.indices():
            numbers = tuple(n for members in groups for n in members)
            shards.append(Shard(tuple(parameters[n] for n in numbers), numbers))
        if self._bucket_view:
            if self._views is None:
                self._views = BucketViews([s.parameters for s in shards])
            else:
                self._views.build([s.parameters for s in shards])
        self._sharing.use(shards, names_of(self.param_groups), self._views)

    def _inherit(self, origin: ZeroRedundancyOptimizer | None) -> None:
        """Keep the state that was loaded before Horovod rebuilt the optimizer."""
        if origin is not None:
            self.optim.state.update(origin.optim.state)
