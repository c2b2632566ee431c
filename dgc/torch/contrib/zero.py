"""``ZeroRedundancyOptimizer``: shard any torch optimizer, so that every rank updates its share of the parameters.

P = number of ranks.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.job import errors_on_all_ranks
from dgc.errors import ConfigError, LayoutError
from dgc.torch.contrib.momentum import DGCMomentum
from dgc.torch.distributed import DistributedJob, TorchJob, ddp_over, job_of
from dgc.torch.packing import gather_packed, packed, unpacked
from dgc.torch.untraced import untraced

Group = dict[str, Any]

_NO_OPTIONS = ("params", "param_names")

_ADVICE = (
    "Set the same options, learning rates above all, on every rank: give schedulers such as ReduceLROnPlateau a value "
    "averaged over the ranks, and load a state on every rank, which takes its share. An optimizer whose update "
    "computes an option from its share of the parameters or from its own loss cannot be sharded."
)


def assign_owners(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Choose, for each group, the rank that owns each parameter.

    The largest parameters of a group are placed first, each on the rank with the fewest elements. Loads are carried
    from group to group, so that the model is balanced and later groups do not change earlier owners. Ties go to the
    lower rank, and among parameters to the earlier one.

    Args:
        groups: for each group, each parameter's number of elements.
        size: P.

    Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054 (stage 1); greedy scheduling after Graham 1969.
    """
    loads, found = [0] * size, []
    for numels in groups:
        owners = [0] * len(numels)
        for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += numels[i]
        found.append(owners)
    return found


class ZeroRedundancyOptimizer(Optimizer):
    """A sharded torch optimizer: every rank holds and steps its share of the parameters.

    Each rank keeps the optimizer state of about 1/P of the elements. After its update it broadcasts the new values to
    the other ranks, so that all ranks hold the same bits after every step.

    Gradients must have been averaged before ``step()``: by ``DistributedDataParallel``, or by Horovod's or dgc's
    ``DistributedOptimizer`` around this optimizer.

    ``param_groups`` hold all parameters, so schedulers and ``zero_grad`` work as with any optimizer. All ranks must
    call the constructor, ``step``, ``add_param_group`` and ``consolidate_state_dict`` at the same point.

    The optimizer cannot be copied or pickled; save its ``state_dict()``.

    Attributes:
        optim: the local optimizer of this rank's share.
        optimizer_class: the class of ``optim``.

    Source: Rajbhandari et al. 2020, arXiv 1910.02054, stage 1; interface of torch.distributed.optim.
    """

    param_groups: list[Group]
    defaults: dict[str, Any]
    state: Any
    optim: Optimizer
    optimizer_class: type[Optimizer]
    _ready = _knows_ddps = False

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
        **defaults: Any,
    ) -> None:
        """Shard an optimizer. Collective over its ranks.

        Args:
            params: parameters, (name, parameter) pairs or group dicts, the same on every rank.
            optimizer_class: class of the local optimizers, such as ``torch.optim.Adam``. It must update each parameter
                separately: a class that computes a norm or a step size over several parameters would see only a share.
            group: a ``torch.distributed`` process group, or a ``hvd.ProcessSet``; None means all ranks, those of
                Horovod if it is initialised, else those of torch.distributed.
            parameters_as_bucket_view: keep each rank's parameters in one flat buffer per device (``p.data`` becomes a
                view of it), which is sent in one broadcast instead of one for each parameter.
            overlap_with_ddp: must be False.
            process_group: another name for ``group``.
            process_set: another name for ``group``.
            **defaults: options of the local optimizers.

        Raises:
            TypeError: ``params``, ``optimizer_class`` or ``group`` has a wrong type.
            ConfigError: (a ValueError) ``overlap_with_ddp`` is True, the class cannot be sharded, or neither Horovod
                nor torch.distributed is initialised.
            LayoutError: (a ValueError) parameters are sparse, complex, of different types, listed twice or in the same
                memory; or parameters or options differ between ranks.
            RemoteError: another rank met one of these errors.
        """
        if optimizer_class is None and isinstance(params, _OwnedGroups):  # Horovod builds an object of a derived class
            self._take_over(params)
            return
        with errors_on_all_ranks(job_of()):
            self._job = _job_among(group, process_group, process_set)
        self._job.require_ready()
        self._transport = self._job.make_transport()
        self._flat: list[tuple[int, Tensor]] | None = [] if parameters_as_bucket_view else None
        self._places: list[tuple[Tensor, Tensor]] = []  # parameters in flat buffers, and their parts of them
        self._consolidated: dict[Any, Any] | None = None
        self._loads = 0  # states loaded so far

        def build() -> dict[str, Any]:
            if overlap_with_ddp:
                raise ConfigError(
                    "overlap_with_ddp=True is not supported; leave it out: gradients are averaged during the backward "
                    "pass, and parameters are sent after the update"
                )
            self.optimizer_class = _checked_class(optimizer_class)
            if isinstance(params, (set, frozenset)):
                raise TypeError("params is a set, whose order differs between ranks; give a list")
            Optimizer.__init__(self, params, dict(defaults))
            self._share_out()
            self.optim = self.optimizer_class(self._local_groups(), **defaults)
            return {
                "optimizer_class": self.optimizer_class.__name__,
                "parameters_as_bucket_view": bool(parameters_as_bucket_view),
                **{name: f"{tuple(p.shape)} {p.dtype}" for name, p in zip(self._names(), self._all(), strict=True)},
                **{f"option {key}": _comparable(value) for key, value in defaults.items()},
                **self._options(),
            }

        what = "parameters and options of the sharded optimizer"
        advice = "Build the same model and the same optimizer on every rank."
        agree_or_raise(self._transport, build, what, LayoutError, advice)
        self.defaults = {**self.optim.defaults, **self.defaults}
        self._settle()

    def _take_over(self, groups: _OwnedGroups) -> None:
        """Take all that the owner of ``groups`` has; Horovod has derived this object's class from the owner's."""
        origin = groups.owner()
        assert origin is not None, "Horovod holds it"
        taken = ("optim", "optimizer_class", "_job", "_transport", "_owners", "_flat", "_places", "_consolidated")
        Optimizer.__init__(self, list(groups), origin.defaults)
        self.__dict__.update({name: vars(origin)[name] for name in (*taken, "_loads")})
        self._settle()

    def _share_out(self) -> None:
        _require_shardable(self.param_groups)
        numels = [[p.numel() for p in group["params"]] for group in self.param_groups]
        self._owners = assign_owners(numels, self._transport.size)

    def _settle(self) -> None:
        for group, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            for name, value in local.items():  # setdefault keeps options that a scheduler has set
                if name not in _NO_OPTIONS:
                    group.setdefault(name, value)
        if not isinstance(self.param_groups, _OwnedGroups):
            self.param_groups = _OwnedGroups(self.param_groups)
            self.param_groups.owner = weakref.ref(self)
        self._known = self._ids()
        self._fill_buffers()
        self._ready = True

    @property
    def local_optimizer(self) -> Optimizer:
        """The same as ``optim``. By this name a compressor finds the optimizer whose options it adopts."""
        return self.optim

    # -- training ------------------------------------------------------------------------------------------------------

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Update this rank's share, and send all new values to all ranks. Collective.

        Args:
            closure: recomputes the loss. It is called once. Horovod's own ``DistributedOptimizer`` allows no closure.
            **kwargs: passed to the local optimizer's ``step``.

        Returns:
            The result of the local optimizer's ``step``.

        Raises:
            ConfigError: the gradients are not averaged over the ranks of this optimizer.
            LayoutError: the ranks disagree about the groups' options, for instance learning rates; or ``param_groups``
                were changed by hand.
            RemoteError: the update failed on another rank. Ranks whose update succeeded have changed their own share;
                the next step makes all ranks equal.
            TransportError: the new values could not be sent.
        """
        results = []

        def update() -> dict[str, Any]:
            if closure is not None and hasattr(self, "_handles"):
                raise ConfigError(
                    "step(closure) of a sharded optimizer inside Horovod's DistributedOptimizer would update by "
                    "gradients that are not averaged: call the closure, then step() without it"
                )
            self._require_averaging_ranks()
            self._require_known_parameters()
            with torch.enable_grad():
                loss = None if closure is None else closure()  # it may change the groups' options
            _copy_options(self.param_groups, self.optim.param_groups)
            returned = self.optim.step(**kwargs)
            results.append(returned if closure is None else loss)
            _copy_options(self.optim.param_groups, self.param_groups)
            return {**self._options(), "states loaded": self._loads}

        agree_or_raise(self._transport, update, "options of the sharded optimizer", LayoutError, _ADVICE)
        self._share()
        return results[0]

    @torch.no_grad()
    def _share(self) -> None:
        """Overwrite every rank's parameters with the owners' values."""
        if self._transport.size == 1:
            return
        if self._flat is None:
            tensors = [(owner, p) for owner, p in self._owned() if p.numel()]
        else:
            moved = any(p.data_ptr() != q.data_ptr() or p.stride() != q.stride() for p, q in self._places)
            if moved:  # model.to(), for instance, gives parameters other memory
                self._fill_buffers()
            tensors = self._flat
        self._job.broadcast((f"dgc.zero.{i}", owner, tensor) for i, (owner, tensor) in enumerate(tensors))()

    @torch.no_grad()
    def _fill_buffers(self) -> None:
        """Move each owner's parameters to flat buffers, one for each device and type."""
        if self._flat is None:
            return
        self._flat, self._places = [], []
        kinds: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for owner, p in self._owned():
            if p.numel():
                kinds.setdefault((owner, p.device, p.dtype), []).append(p)
        for (owner, device, dtype), members in kinds.items():
            sizes = [p.numel() for p in members]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            for p, part in zip(members, flat.split(sizes), strict=True):
                p.data = part.view(p.shape).copy_(p.data)
                self._places.append((p, p.data))
            self._flat.append((owner, flat))

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, and give them to the ranks with the fewest elements. Old parameters keep their owners.

        Call it on all ranks. If a rank does not, the next ``step()`` raises an error.

        Raises:
            TypeError: ``param_group`` is not a dict, or holds no tensors.
            LayoutError: a parameter is sparse, complex, of another type than the others, or in another one's memory.
            ConfigError: the optimizer is wrapped in a ``DistributedOptimizer``, which would not average the new
                gradients.
        """
        if isinstance(param_group, dict) and "params" not in param_group:
            raise LayoutError(f"a parameter group has no 'params', only {sorted(param_group)}")
        if not self._ready:  # torch's constructor calls this for every group
            super().add_param_group(param_group)
            return
        if hasattr(self, "skip_synchronize"):
            raise ConfigError(
                "DistributedOptimizer averages the gradients of the parameters that the optimizer had when it was "
                "wrapped, and not those of a new group; call add_param_group before wrapping"
            )
        self._require_known_parameters()
        number = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._share_out()
            self.optim.add_param_group(self._local_groups()[number])
        except Exception:
            del self.param_groups[number:], self.optim.param_groups[number:], self._owners[number:]
            raise
        self._settle()

    def partition_parameters(self) -> list[list[Group]]:
        """Return, for each rank, its parameter groups: dictionaries of options and of the parameters that it owns."""
        return [self._local_groups(rank) for rank in range(self._transport.size)]

    # -- saving --------------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Copy the state of all shards to the CPU of one rank. Collective.

        Args:
            to: the rank, counted within the optimizer's ranks, whose ``state_dict()`` works afterwards.

        Raises:
            ConfigError: there is no such rank, or the ranks name different ones.
            LayoutError: ``param_groups`` were changed by hand.
            RemoteError: another rank failed.
        """
        own: list[np.ndarray] = []

        def build() -> dict[str, int]:
            number, size = operator.index(to), self._transport.size
            if not 0 <= number < size:
                raise ConfigError(f"to={number}, but the optimizer's ranks are 0 to {size - 1}")
            self._require_known_parameters()
            _copy_options(self.param_groups, self.optim.param_groups)
            share = _full_entries(self.optim.state_dict(), self._indices()[self._transport.rank])
            own.append(packed(share, f"the state of {self.optimizer_class.__name__}"))
            return {"to": number}

        what, advice = "arguments of consolidate_state_dict", "Name the same rank everywhere."
        agree_or_raise(self._transport, build, what, advice=advice)
        self._consolidated = None
        parts = gather_packed(self._transport, own[0], to)
        if self._transport.rank == to:
            self._consolidated = {key: value for part in parts for key, value in unpacked(part).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all shards at the last ``consolidate_state_dict``, in torch's ordinary layout.

        It loads into an unsharded optimizer, or into a sharded one on any number of ranks. One key is added:
        ``"partition"`` lists, for each rank and group, the numbers of the parameters that the rank owns. The result is
        a copy.

        Raises:
            RuntimeError: this rank has no consolidated state, or has loaded another state since then.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._transport.rank} holds only its own share of the optimizer's state: call "
                f"consolidate_state_dict(to={self._transport.rank}) on all ranks first (and do not broadcast a state: "
                "load_state_dict on every rank takes its share)"
            )
        own, left = self.state, dict(self._consolidated)
        whole = {p: left.pop(number) for number, p in enumerate(self._all()) if number in left}
        self.state = defaultdict(dict, {**whole, **left})
        try:
            full = super().state_dict()
        finally:
            self.state = own
        return _copied({**full, "partition": self._indices()})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of the unsharded optimizer. Call it on all ranks; each takes its share.

        The given dict is neither changed nor kept.

        Raises:
            LayoutError: (a ValueError) it is not a state dict, or its groups have other sizes.
        """
        _require_state_dict(state_dict)
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._require_known_parameters()
        saved, here = ([len(g["params"]) for g in gs] for gs in (state_dict["param_groups"], self.param_groups))
        if saved != here:
            raise LayoutError(
                f"the loaded state dict has parameter groups of {saved} parameters, the optimizer of {here}; it "
                "belongs to another model or another choice of groups"
            )
        self.optim.load_state_dict(_local_dict(state_dict, self._indices()[self._transport.rank]))
        _copy_options(state_dict["param_groups"], self.param_groups)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None
        self._loads += 1
        if _momentum_is_adopted(self):
            # Every rank's compressor expects the momentum of all parameters in the outer optimizer's state.
            for key, p in zip(_keys(state_dict), self._all(), strict=True):
                buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
                if buffer is not None:
                    self.state[p]["momentum_buffer"] = buffer.detach().to(p.device, copy=True)
                self.optim.state.get(p, {}).pop("momentum_buffer", None)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def local_state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's ``state_dict()``: this rank's share, with parameters numbered from 0."""
        _copy_options(self.param_groups, self.optim.param_groups)  # the local ones may still hide what is compressed
        return self.optim.state_dict()

    @staticmethod
    def rank_local_state_dict(rank: int, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return one rank's share of a result of :meth:`state_dict`, in the form that its local optimizer loads.

        Args:
            rank: the rank, counted within the ranks of the optimizer that was saved.
            state_dict: the state of all shards.

        Raises:
            LayoutError: (a ValueError) ``state_dict`` has no partition, or no such rank.
        """
        partition = state_dict.get("partition")
        if partition is None:
            raise LayoutError("the state dict has no 'partition': no sharded optimizer made it")
        if not 0 <= rank < len(partition):
            raise LayoutError(f"rank is {rank}, but the state dict was made by ranks 0 to {len(partition) - 1}")
        return _local_dict(state_dict, partition[rank])

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse ``copy`` and ``pickle``."""
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied, pickled or saved itself: it is one rank's share. Call "
            "consolidate_state_dict() on all ranks, save state_dict(), and load that into a new optimizer"
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _all(self) -> list[Tensor]:
        """Return all parameters in registration order."""
        return [p for group in self.param_groups for p in group["params"]]

    def _owned(self) -> Iterable[tuple[int, Tensor]]:
        """Return (owner, parameter) pairs in registration order."""
        return zip(itertools.chain(*self._owners), self._all(), strict=True)

    def _indices(self) -> list[list[list[int]]]:
        """Return, for each rank and group, the numbers of the owned parameters, counted over all groups."""
        numbers = itertools.count()
        numbered = [[(owner, next(numbers)) for owner in owners] for owners in self._owners]
        ranks = range(self._transport.size)
        return [[[n for owner, n in group if owner == rank] for group in numbered] for rank in ranks]

    def _names(self) -> list[str]:
        """Return a unique name for each parameter: its place, and its own name if it has one."""
        names = []
        for g, group in enumerate(self.param_groups):
            own = group.get("param_names") or [""] * len(group["params"])
            names += [f"group {g} parameter {i}" + (f" ({name})" if name else "") for i, name in enumerate(own)]
        return names

    def _options(self) -> dict[str, Any]:
        """Return the groups' options, which must be equal on all ranks, by name."""
        return {
            f"group {g} option {key}": _comparable(value)
            for g, group in enumerate(self.param_groups)
            for key, value in group.items()
            if key not in _NO_OPTIONS
        }

    def _local_groups(self, rank: int | None = None) -> list[Group]:
        """Return a rank's share of each group; None means this rank. Shares may be empty."""
        rank = self._transport.rank if rank is None else rank
        groups = []
        for group, owners in zip(self.param_groups, self._owners, strict=True):
            owned = [p for p, owner in zip(group["params"], owners, strict=True) if owner == rank]
            groups.append({**{k: v for k, v in group.items() if k not in _NO_OPTIONS}, "params": owned})
        return groups

    def _require_averaging_ranks(self) -> None:
        """Refuse to share updates among ranks whose gradients are not averaged together."""
        averaged, ours = getattr(self, "process_set", None), self._job.members
        if not isinstance(self._job, DistributedJob):
            if averaged is not None and getattr(averaged, "process_set_id", None) != getattr(
                ours, "process_set_id", None
            ):
                raise ConfigError(
                    f"gradients are averaged over {averaged}, but the optimizer is sharded over {ours}; give both the "
                    "same process set"
                )
            return
        groups = [averaged] if "process_set" in vars(self) else []
        if not groups and not self._knows_ddps:
            groups, self._knows_ddps = [ddp.process_group for ddp in ddp_over(self._all())], True
        theirs = [DistributedJob(group).ranks() for group in groups]
        if theirs and not any({*self._job.ranks()} <= {*ranks} for ranks in theirs):
            raise ConfigError(
                f"gradients are averaged over the ranks {theirs[0]}, but the optimizer is sharded over "
                f"{self._job.ranks()}, which would share updates by different gradients; give both the same process "
                "group"
            )

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _require_known_parameters(self) -> None:
        if self._ids() != self._known:
            raise LayoutError(
                "param_groups no longer hold the parameters that the ranks have shared out: parameters or groups were "
                "added, removed or replaced by hand; use add_param_group, or build a new optimizer"
            )


class _OwnedGroups(list[Group]):
    """``param_groups`` that refer to their optimizer, because Horovod builds another optimizer from nothing else."""

    owner: weakref.ref[ZeroRedundancyOptimizer]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[list[Group]], tuple[list[Group]]]:
        """Copy the groups as a plain list, which belongs to no optimizer."""
        return list, (list(self),)


def _job_among(*names: Any) -> TorchJob:
    given = [value for value in names if value is not None]
    if len(given) > 1:
        raise ConfigError("group, process_group and process_set mean the same; give one of them")
    if not given:
        return job_of()
    if hasattr(given[0], "process_set_id"):
        return job_of().of(given[0])
    if not isinstance(given[0], torch.distributed.ProcessGroup):
        raise TypeError(
            f"group is a {type(given[0]).__name__}; give a torch.distributed process group, a "
            "horovod.torch.ProcessSet, or None for all ranks"
        )
    return job_of(given[0])


def _momentum_is_adopted(optimizer: Any) -> bool:
    """Return whether the optimizer was wrapped with a compressor that takes its momentum."""
    compressor = getattr(optimizer, "compression", None) or getattr(optimizer, "_compression", None)
    engine = getattr(compressor, "engine", None)
    return engine is not None and engine.adoption.active


def _checked_class(optimizer_class: object) -> type[Optimizer]:
    """Return the class of the local optimizers; raise if it cannot be sharded."""
    if not isinstance(optimizer_class, type):
        raise TypeError(f"optimizer_class is {optimizer_class!r}; give a class such as torch.optim.Adam")
    name = optimizer_class.__name__
    if not issubclass(optimizer_class, Optimizer):
        raise ConfigError(
            f"optimizer_class is {name}, which is no torch.optim.Optimizer; functional optimizers serve to overlap "
            "with torch's DDP, which is not supported: give the ordinary class"
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ConfigError("LBFGS needs all parameters in one place and cannot be sharded; use it without sharding")
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in optimizer_class.__mro__):
        raise ConfigError(
            "optimizer_class is a ZeroRedundancyOptimizer, and a shard cannot be sharded again; give the class that "
            "updates the parameters, such as torch.optim.Adam"
        )
    if issubclass(optimizer_class, DGCMomentum) or hasattr(optimizer_class, "skip_synchronize"):
        raise ConfigError(
            f"optimizer_class {name} averages gradients itself, and each rank would average those of other parameters; "
            "give a plain class such as torch.optim.SGD and wrap the sharded optimizer in "
            "dgc.torch.DistributedOptimizer, perhaps with compression=Compression.dgc()"
        )
    return optimizer_class


def _require_shardable(groups: Iterable[Group]) -> None:
    """Refuse parameters that ranks cannot own one by one."""
    tensors = [p for group in groups for p in group["params"]]
    seen: dict[Any, int] = {}
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise LayoutError(f"parameter number {i} is {tensor.layout}; only dense parameters can be sharded")
        if tensor.is_complex():
            raise LayoutError(
                f"parameter number {i} is complex, and Horovod and Gloo send no complex numbers; store it as a real "
                "parameter (torch.view_as_real) and view it as complex in the model"
            )
        if tensor.type() != tensors[0].type():
            raise LayoutError(
                f"parameter number {i} is a {tensor.type()}, the first one a {tensors[0].type()}; build one optimizer "
                "for each type"
            )
        first = seen.setdefault((tensor.device, tensor.data_ptr()), i) if tensor.numel() else i
        if first != i:
            same = "the same" if tensors[first] is tensor else "in the same memory"
            raise LayoutError(
                f"parameters number {first} and {i} are {same}; list each one once, and to tie weights let both "
                "modules hold one Parameter"
            )


def _comparable(value: object) -> object:
    """Return an option as a value that JSON knows, to compare it between ranks. Other objects become their type."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, (tuple, list)):
        return [_comparable(v) for v in value]
    return f"<{type(value).__name__}>"


def _copy_options(source: Iterable[Mapping[str, Any]], target: Iterable[Group]) -> None:
    for given, taken in zip(source, target, strict=True):
        taken.update((k, v) for k, v in given.items() if k not in _NO_OPTIONS)


def _copied(value: object) -> Any:
    """Return ``value`` with a copy of every tensor in it."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), value)


def _full_entries(local: Mapping[str, Any], owned: Sequence[Sequence[int]]) -> dict[Any, Any]:
    """Return the state of a local ``state_dict()`` under the parameters' global numbers, copied to the CPU."""
    return {
        number: tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), local["state"][place])
        for place, number in enumerate(n for group in owned for n in group)
        if place in local["state"]
    } | {key: value for key, value in local["state"].items() if not isinstance(key, int)}


def _local_dict(full: Mapping[str, Any], owned: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a copy of a rank's entries of a full state dict, in the form that its local optimizer loads."""
    groups: list[Group] = []
    state, place, keys = {}, 0, _keys(full)
    for saved, members in zip(full["param_groups"], owned, strict=True):
        numbers = list(range(place, place + len(members)))
        groups.append({**{k: v for k, v in saved.items() if k not in _NO_OPTIONS}, "params": numbers})
        for number in members:
            if keys[number] in full["state"]:
                state[place] = _copied(full["state"][keys[number]])
            place += 1
    state.update({k: _copied(v) for k, v in full["state"].items() if not isinstance(k, int)})
    return {"state": state, "param_groups": groups}


def _keys(full: Mapping[str, Any]) -> list[Any]:
    """Return the state dict's key of each parameter, usually 0, 1, 2, ..."""
    return [key for group in full["param_groups"] for key in group["params"]]


def _require_state_dict(value: object) -> None:
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    sound = isinstance(groups, (list, tuple)) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if not sound or not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        found = f"a dict of {sorted(map(str, value))}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise LayoutError(
            f"an optimizer's state dict holds 'state' and 'param_groups' with 'params', but this is {found}; load on "
            "every rank what state_dict() returned on the rank that consolidate_state_dict(to=...) named"
        )
