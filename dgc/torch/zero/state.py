"""The state of a sharded optimizer: options of the local one, and state dicts in torch's layout."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from dgc.errors import ConfigError, LayoutError
from dgc.torch.zero import checkpoints
from dgc.torch.zero.adopted import hand_over_momentum, momentum_is_adopted
from dgc.torch.zero.groups import copy_options
from dgc.torch.zero.partition import Partition
from dgc.torch.zero.ranks import Ranks


class ShardedState(Optimizer):
    """What a sharded optimizer keeps, saves and loads; its constructor and step are the subclass's.

    Attributes:
        optim: the local optimizer of this rank's share.
        optimizer_class: its class.
    """

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    optim: Optimizer
    optimizer_class: type[Optimizer]
    _ranks: Ranks
    _partition: Partition
    _known: list[list[int]]
    _consolidated: list[dict[Any, Any]] | None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all shards to one rank, as copies on the CPU. Collective.

        Args:
            to: the rank, counted within the process set, whose ``state_dict()`` works afterwards.

        Raises:
            ConfigError: no such rank, or not the same on all ranks.
            LayoutError: ``param_groups`` were changed by hand.
            RemoteError: it failed on another rank.
            TransportError: a rank has joined.
        """
        data, failure = None, None
        try:
            to = operator.index(to)
            if not 0 <= to < self._ranks.size:
                raise ConfigError(f"to={to}, but the optimizer's ranks are 0 to {self._ranks.size - 1}")
            self._require_known_parameters()
            self._push_options()
            owned = self._partition.indices()[self._ranks.rank]
            entries = checkpoints.full_entries(self.optim.state_dict(), owned)
            data = checkpoints.to_bytes(entries)
        except Exception as error:
            failure, to = error, -1
        found = self._ranks.collect(data, failure, to)
        self._consolidated = None if found is None else [checkpoints.from_bytes(part) for part in found]

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state as of the last ``consolidate_state_dict``, in torch's ordinary layout.

        It loads into an unsharded optimizer, or into a sharded one on any number of ranks. One key is added:
        ``"partition"``, by rank and group the numbers of the parameters that the rank owns. The dict is the caller's:
        nothing changes it later, nor does changing it reach the optimizer.

        Raises:
            RuntimeError: this rank has no consolidated state, or loaded another one since.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._ranks.rank} holds only its own share of the optimizer's state: call "
                f"consolidate_state_dict(to={self._ranks.rank}) on all ranks first (and instead of "
                "hvd.broadcast_optimizer_state, load_state_dict on every rank: each takes its share)"
            )
        full = checkpoints.full_dict(self.param_groups, self._consolidated, self._partition.indices())
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, full)
            full = full if changed is None else changed
        return full

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of the unsharded optimizer; every rank takes its share.

        The given dict is neither changed nor kept.

        Raises:
            LayoutError: (a ValueError) it is no state dict, or has other groups.
        """
        checkpoints.require_state_dict(state_dict)
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        checkpoints.require_state_dict(state_dict)
        self._require_known_parameters()
        checkpoints.check_groups(state_dict, [len(g["params"]) for g in self.param_groups])
        owned = self._partition.indices()[self._ranks.rank]
        self.optim.load_state_dict(checkpoints.local_dict(state_dict, owned))
        copy_options(state_dict["param_groups"], self.param_groups)
        self._pull_options()
        self._consolidated = None
        if momentum_is_adopted(self):
            hand_over_momentum(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would hold one rank's share and no connection to the others.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied, pickled or saved itself: it is one rank's share. Call "
            "consolidate_state_dict() on all ranks, save state_dict(), and load_state_dict() it into a new optimizer"
        )

    def _require_known_parameters(self) -> None:
        found = [list(map(id, group["params"])) for group in self.param_groups]
        if found != self._known:
            raise LayoutError(
                "param_groups no longer hold the parameters that the ranks share out: parameters or groups were put "
                "in, taken out or replaced by hand; use add_param_group, or build a new optimizer"
            )

    def _push_options(self) -> None:
        """What schedulers and users set in ``param_groups`` reaches the local optimizer."""
        copy_options(self.param_groups, self.optim.param_groups)

    def _pull_options(self) -> None:
        copy_options(self.optim.param_groups, self.param_groups)
