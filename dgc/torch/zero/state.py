"""State of a sharded optimizer: options of the local one, and state dicts in torch's layout, whole and by shard.

A full state dict numbers the parameters over all groups, a shard's own numbers only what its rank owns. Where a
compressor applies momentum in the sharded optimizer's place, a checkpoint's momentum must reach every rank whole:
momentum correction is every rank's own and for all parameters, and a share of it would reach one rank.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from dgc.adapter.engine import Uncopied
from dgc.errors import ConfigError, LayoutError
from dgc.torch.zero.groups import Group, copy_options, parameters_of
from dgc.torch.zero.memory import Partition
from dgc.torch.zero.ranks import Ranks
from dgc.transport.agreement import agree_or_raise

Owned = Sequence[Sequence[int]]
"""By group, the full numbers of the parameters that a rank owns, in the order of its local groups."""


def full_entries(local: Mapping[str, Any], owned: Owned) -> dict[Any, Any]:
    """The state of a local ``state_dict()`` under full numbers, its tensors copied to the CPU."""
    return {
        number: tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), local["state"][place])
        for place, number in enumerate(n for group in owned for n in group)
        if place in local["state"]
    } | {key: value for key, value in local["state"].items() if not isinstance(key, int)}


def local_dict(full: Mapping[str, Any], owned: Owned) -> dict[str, Any]:
    """What a rank's local optimizer loads: its entries of a full state dict, copied.

    Nothing of ``full`` is changed or shared, so neither loading nor later steps touch the caller's dict.
    """
    groups, state, place = [], {}, 0
    keys = _keys(full)
    for saved, members in zip(full["param_groups"], owned, strict=True):
        groups.append(
            {
                **{k: v for k, v in saved.items() if k not in ("params", "param_names")},
                "params": list(range(place, place + len(members))),
            }
        )
        for number in members:
            if keys[number] in full["state"]:
                state[place] = _copied(full["state"][keys[number]])
            place += 1
    state.update({k: _copied(v) for k, v in full["state"].items() if not isinstance(k, int)})
    return {"state": state, "param_groups": groups}


def full_dict(
    groups: Iterable[Group], parts: Iterable[Mapping[Any, Any]], partition: Sequence[Owned]
) -> dict[str, Any]:
    """A whole state dict in torch's layout, of what :func:`full_entries` returned on every rank; shares no tensor."""
    packed, number = [], 0
    for group in groups:
        numbers = list(range(number, number + len(group["params"])))
        packed.append({**{k: _copied(v) for k, v in group.items() if k != "params"}, "params": numbers})
        number += len(numbers)
    entries = {key: _copied(value) for part in parts for key, value in part.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (not isinstance(item[0], int), item[0])))
    return {"state": ordered, "param_groups": packed, "partition": [list(map(list, owned)) for owned in partition]}


def require_state_dict(value: object) -> None:
    """Refuse what is no state dict of an optimizer.

    Raises:
        LayoutError: (a ValueError) it is no dict, or one without ``"state"`` or ``"param_groups"``.
    """
    if not isinstance(value, Mapping):
        found = f"a {type(value).__name__}"
    else:
        groups = value.get("param_groups")
        sound = isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)
        if sound and isinstance(value.get("state"), Mapping):
            return
        found = f"a dict of {sorted(map(str, value))}"
    raise LayoutError(
        f"an optimizer's state dict holds 'state' and 'param_groups' with 'params', but this is {found}; load on every "
        "rank what state_dict() returned on the rank that consolidate_state_dict(to=...) named"
    )


def check_groups(full: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Refuse a state dict of other groups.

    Raises:
        LayoutError: (a ValueError) another number of groups or of parameters in a group.
    """
    saved = [len(group["params"]) for group in full["param_groups"]]
    if saved != list(lengths):
        raise LayoutError(
            f"the loaded state dict has parameter groups of {saved} parameters, the optimizer of {list(lengths)}; it "
            "belongs to another model or another choice of groups"
        )


def _keys(full: Mapping[str, Any]) -> list[Any]:
    """The state dict's own key of each parameter: usually 0, 1, 2, ... in order."""
    return [key for group in full["param_groups"] for key in group["params"]]


def _copied(value: object) -> Any:
    """``value`` with a copy of every tensor inside."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), value)


def momentum_is_adopted(optimizer: Optimizer) -> bool:
    """Whether the optimizer was wrapped together with a compressor that takes its momentum."""
    compressor = getattr(optimizer, "compression", None) or getattr(optimizer, "_compression", None)
    engine = getattr(compressor, "engine", None)
    return engine is not None and engine.adoption.active


def hand_over_momentum(optimizer: ShardedState, saved: Mapping[str, Any]) -> None:
    """Leave the momentum buffers of all parameters where the compressor of every rank looks for them.

    The sharded optimizer's share of them is taken out of its local optimizer.
    """
    for key, p in zip(_keys(saved), parameters_of(optimizer.param_groups), strict=True):
        buffer = saved["state"].get(key, {}).get("momentum_buffer")
        if buffer is not None:
            optimizer.state[p]["momentum_buffer"] = buffer.detach().to(p.device, copy=True)
        if p in optimizer.optim.state:
            optimizer.optim.state[p].pop("momentum_buffer", None)


class ShardedState(Uncopied, Optimizer):
    """What a sharded optimizer keeps, saves and loads; its constructor and step are the subclass's.

    Attributes:
        optim: the local optimizer of this rank's share.
        optimizer_class: its class.
    """

    param_groups: list[Group]
    defaults: dict[str, Any]
    optim: Optimizer
    optimizer_class: type[Optimizer]
    _ranks: Ranks
    _partition: Partition
    _known: list[list[int]]
    _consolidated: list[dict[Any, Any]] | None
    _state_loaded: bool

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
        data = torch.empty(0, dtype=torch.uint8)

        def build() -> dict[str, int]:
            nonlocal data
            number = operator.index(to)
            if not 0 <= number < self._ranks.size:
                raise ConfigError(f"to={number}, but the optimizer's ranks are 0 to {self._ranks.size - 1}")
            self._require_known_parameters()
            self._push_options()
            buffer = io.BytesIO()
            torch.save(full_entries(self.optim.state_dict(), self._partition.indices()[self._ranks.rank]), buffer)
            data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
            return {"to": number}

        self._ranks.begin_count()
        self._ranks.end_count()
        what, advice = "arguments of consolidate_state_dict", "Name the same rank everywhere."
        agreed = agree_or_raise(self._ranks.transport, build, what, advice=advice)
        found = self._ranks.collect(data, agreed["to"])
        self._consolidated = None
        if found is not None:  # bytes of other ranks of this job
            files = [io.BytesIO(part.numpy().tobytes()) for part in found]
            self._consolidated = [torch.load(file, map_location="cpu", weights_only=False) for file in files]

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
        full = full_dict(self.param_groups, self._consolidated, self._partition.indices())
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
        require_state_dict(state_dict)
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        require_state_dict(state_dict)
        self._require_known_parameters()
        check_groups(state_dict, [len(g["params"]) for g in self.param_groups])
        owned = self._partition.indices()[self._ranks.rank]
        self.optim.load_state_dict(local_dict(state_dict, owned))
        copy_options(state_dict["param_groups"], self.param_groups)
        self._pull_options()
        self._consolidated = None
        self._state_loaded = True
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
        return local_dict(state_dict, partition[rank])

    uncopied = (
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
