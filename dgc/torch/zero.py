"""``ZeroRedundancyOptimizer``: shard any torch optimizer, so that every rank updates its share of the parameters.

P = number of ranks.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.job import errors_on_all_ranks
from dgc.errors import ConfigError, LayoutError
from dgc.torch.distributed import DistributedJob, TorchJob, ddp_over, job_of
from dgc.torch.packing import gather_packed, packed, unpacked
from dgc.torch.untraced import untraced

Group = dict[str, Any]

_NO_OPTIONS = ("params", "param_names")
_TAKEN = ("optim", "optimizer_class", "_job", "_transport", "_owners", "_buckets", "_consolidated", "_loads")

_ADVICE = (
    "Set the same options, learning rates above all, on every rank: give schedulers such as ReduceLROnPlateau a value "
    "averaged over the ranks, and load a state on every rank, which takes its share. An optimizer whose update "
    "computes an option from its share of the parameters or from its own loss cannot be sharded."
)


class ZeroRedundancyOptimizer(Optimizer):
    """A sharded torch optimizer: every rank holds and steps its share of the parameters, about 1/P of the elements.

    After its update it broadcasts the new values, so that all ranks hold the same bits after every step. Gradients must
    have been averaged before ``step()``: by ``DistributedDataParallel``, or by Horovod's or dgc's
    ``DistributedOptimizer`` around this optimizer.

    ``param_groups`` hold all parameters, so schedulers and ``zero_grad`` work as with any optimizer. All ranks must
    call the constructor, ``step``, ``add_param_group`` and ``consolidate_state_dict`` at the same point. The optimizer
    cannot be copied or pickled; save its ``state_dict()``.

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
    _shards_updates = True  # this tells dgc's compressor that it may apply plain SGD updates to all shares itself

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
        """Shard an optimizer. Collective over its ranks. docs/zero.md has a table of the arguments.

        Raises:
            TypeError: ``params`` or ``group`` has a wrong type.
            ConfigError: (a ValueError) another argument is wrong, or neither Horovod nor torch.distributed is
                initialised.
            LayoutError: (a ValueError) parameters are sparse, complex, of different types, listed twice or in the same
                memory; or parameters or options differ between ranks.
            RemoteError: another rank met one of these errors.
        """
        if optimizer_class is None and isinstance(params, _OwnedGroups):
            # Horovod derives a class from this one, and builds an object of it from the groups alone.
            origin: Any = params.owner()
            Optimizer.__init__(self, list(params), origin.defaults)
            self.__dict__.update({name: vars(origin)[name] for name in _TAKEN})
            self._settle()
            return
        with errors_on_all_ranks(job_of()):
            self._job = _job_among(group, process_group, process_set)
        self._job.require_ready()
        self._transport = self._job.make_transport()
        # Of each bucket: the owner, the flat buffer, the parameters in it and their addresses. None without buckets.
        self._buckets: list[tuple[int, Tensor, list[Tensor], list[int]]] | None
        self._buckets = [] if parameters_as_bucket_view else None
        self._consolidated: dict[Any, Any] | None = None  # by the parameters' numbers, counted over all groups
        self._loads = 0  # states loaded so far

        def build() -> dict[str, Any]:
            if overlap_with_ddp:
                raise ConfigError("overlap_with_ddp=True is not supported; leave it out")
            self.optimizer_class = _checked_class(optimizer_class)
            if isinstance(params, (set, frozenset)):
                raise TypeError("params is a set, whose order differs between ranks; give a list")
            Optimizer.__init__(self, params, dict(defaults))
            self._assign_owners()
            self.optim = self.optimizer_class(self._local_groups(self._transport.rank), **defaults)
            return {
                "optimizer_class": self.optimizer_class.__name__,
                "parameters_as_bucket_view": bool(parameters_as_bucket_view),
                **{
                    f"group {g} parameter {i}": f"{tuple(p.shape)} {p.dtype}"
                    for g, group in enumerate(self.param_groups)
                    for i, p in enumerate(group["params"])
                },
                **{f"option {key}": _comparable(value) for key, value in defaults.items()},
                **self._options(),
            }

        what = "parameters and options of the sharded optimizer"
        advice = "Build the same model and the same optimizer on every rank."
        agree_or_raise(self._transport, build, what, LayoutError, advice)
        self.defaults = {**self.optim.defaults, **self.defaults}
        self._settle()

    def _assign_owners(self) -> None:
        """Choose the rank that owns each parameter of each group.

        The largest parameters of a group are placed first, each on the rank with the fewest elements. Loads are carried
        from group to group, so that the model is balanced and later groups do not change earlier owners. Ties go to the
        lower rank, and among parameters to the earlier one.

        Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054 (stage 1); greedy scheduling after Graham 1969.
        """
        _require_shardable(self._all())
        loads = [0] * self._transport.size
        self._owners: list[list[int]] = []
        for group in self.param_groups:
            numels = [p.numel() for p in group["params"]]
            owners = [0] * len(numels)
            for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
                owners[i] = loads.index(min(loads))
                loads[owners[i]] += numels[i]
            self._owners.append(owners)

    def _settle(self) -> None:
        for group, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            for name, value in _options_of(local).items():
                group.setdefault(name, value)  # this keeps options that a scheduler has set
        self.param_groups = _OwnedGroups(self.param_groups)
        self.param_groups.owner = weakref.ref(self)
        self._fill_buckets()
        self._ready = True

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
            LayoutError: the ranks disagree about the groups' options, or ``param_groups`` were changed by hand.
            RemoteError: the update failed on another rank. Ranks whose update succeeded have changed their own share;
                the next step makes all ranks equal.
        """
        results = []

        def update() -> dict[str, Any]:
            if closure is not None and hasattr(self, "_handles"):
                raise ConfigError(
                    "step(closure) of a sharded optimizer inside Horovod's DistributedOptimizer would update by "
                    "gradients that are not averaged: call the closure, then step() without it"
                )
            self._require_averaging_ranks()
            with torch.enable_grad():
                loss = None if closure is None else closure()  # it may change the groups' options
            self._prepare()
            returned = self.optim.step(**kwargs)
            results.append(returned if closure is None else loss)
            for group, local in zip(self.param_groups, self.optim.param_groups, strict=True):
                group.update(_options_of(local))
            return {**self._options(), "states loaded": self._loads}

        agree_or_raise(self._transport, update, "options of the sharded optimizer", LayoutError, _ADVICE)
        self._share()
        return results[0]

    def _prepare(self) -> None:
        """Give the local optimizer the groups' options and this rank's parameters."""
        if [len(group["params"]) for group in self.param_groups] != list(map(len, self._owners)):
            raise LayoutError("param_groups were changed by hand; use add_param_group, or build a new optimizer")
        for local, group in zip(self.optim.param_groups, self._local_groups(self._transport.rank), strict=True):
            local.update(group)

    @torch.no_grad()
    def _share(self) -> None:
        """Overwrite every rank's parameters with the owners' values."""
        if self._transport.size == 1:
            return
        if self._buckets is None:
            tensors = [(owner, p) for owner, p in self._owned() if p.numel()]
        else:
            if any(places != [p.data_ptr() for p in members] for _, _, members, places in self._buckets):
                self._fill_buckets()  # model.to(), for instance, gives parameters other memory
            tensors = [(owner, flat) for owner, flat, *_ in self._buckets]
        self._job.broadcast((f"dgc.zero.{i}", owner, tensor) for i, (owner, tensor) in enumerate(tensors))()

    def _fill_buckets(self) -> None:
        """Move each owner's parameters to flat buffers, one for each device and type."""
        if self._buckets is None:
            return
        kinds: dict[Any, list[Tensor]] = {}
        for owner, p in self._owned():
            if p.numel():
                kinds.setdefault((owner, p.device, p.dtype), []).append(p)
        self._buckets = []
        for (owner, *_), members in kinds.items():
            flat = _flatten_dense_tensors([p.detach() for p in members])
            for p, part in zip(members, _unflatten_dense_tensors(flat, members), strict=True):
                p.data = part
            self._buckets.append((owner, flat, members, [p.data_ptr() for p in members]))

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, and give them to the ranks with the fewest elements. Old parameters keep their owners.

        Call it on all ranks. If a rank does not, the next ``step()`` raises an error.

        Raises:
            LayoutError: a parameter is sparse, complex, of another type than the others, or in another one's memory.
            ConfigError: the optimizer is wrapped in a ``DistributedOptimizer``.
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
        number = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._assign_owners()
        except LayoutError:
            del self.param_groups[number:]
            raise
        self.optim.add_param_group(self._local_groups(self._transport.rank)[number])
        self._settle()

    def partition_parameters(self) -> list[list[Group]]:
        """Return, for each rank, its parameter groups: dictionaries of options and of the parameters that it owns."""
        return [self._local_groups(rank) for rank in range(self._transport.size)]

    # -- saving --------------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Copy the state of all shards to the CPU of one rank. Collective.

        Args:
            to: the rank, counted within the optimizer's ranks, whose ``state_dict()`` works afterwards.
        """
        own = []

        def build() -> dict[str, int]:
            number, size = operator.index(to), self._transport.size
            if not 0 <= number < size:
                raise ConfigError(f"to={number}, but the optimizer's ranks are 0 to {size - 1}")
            numbers = {p: i for i, p in enumerate(self._all())}
            share = {numbers.get(key, key): entry for key, entry in self.optim.state.items()}
            share = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), share)
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

        It is a copy, with one key more: ``"partition"`` lists, for each rank and group, the numbers of the parameters
        that the rank owns.

        Raises:
            RuntimeError: this rank has no consolidated state, or has loaded another state since then.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._transport.rank} holds only its own share of the optimizer's state: call "
                f"consolidate_state_dict(to={self._transport.rank}) on all ranks first (and do not broadcast a state: "
                "load_state_dict on every rank takes its share)"
            )
        numbers = itertools.count()
        numbered = [[(owner, next(numbers)) for owner in owners] for owners in self._owners]
        ranks = range(self._transport.size)
        partition = [[[n for owner, n in group if owner == rank] for group in numbered] for rank in ranks]
        own, params = self.state, self._all()
        whole = {params[key] if isinstance(key, int) else key: entry for key, entry in self._consolidated.items()}
        self.state = defaultdict(dict, whole)
        try:
            return _copied({**super().state_dict(), "partition": partition})
        finally:
            self.state = own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of the unsharded optimizer. Call it on all ranks; each takes its share.

        The given dict is neither changed nor kept.

        Raises:
            ValueError: its groups have other sizes.
        """
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        others = {key for key, (owner, _) in zip(keys, self._owned(), strict=False) if owner != self._transport.rank}
        # Every rank's compressor expects the momentum of all parameters in the outer optimizer's state.
        adopted = _momentum_is_adopted(self)
        state = {}
        for key, entry in state_dict["state"].items():
            if key not in others:
                state[key] = entry
            elif adopted and "momentum_buffer" in entry:
                state[key] = {"momentum_buffer": entry["momentum_buffer"]}
        groups = self.param_groups
        super().load_state_dict({**state_dict, "state": _copied(state)})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # the same objects, because a scheduler may hold them
        loaded, self.state = self.state, defaultdict(dict)
        for p in (p for p in self._all() if adopted and p in loaded):
            if (momentum := loaded[p].pop("momentum_buffer", None)) is not None:
                self.state[p]["momentum_buffer"] = momentum
            if not loaded[p]:
                del loaded[p]
        self.optim.__setstate__({"state": loaded, "param_groups": self.optim.param_groups})
        self._prepare()
        self._consolidated = None
        self._loads += 1

    def local_state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's ``state_dict()``: this rank's share, with parameters numbered from 0."""
        self._prepare()  # the local optimizer's options may still be 0, from the update that hid them
        return self.optim.state_dict()

    @staticmethod
    def rank_local_state_dict(rank: int, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return one rank's share of a result of :meth:`state_dict`, in the form that its local optimizer loads.

        Args:
            rank: the rank, counted within the ranks of the optimizer that was saved.
            state_dict: the state of all shards.
        """
        owned, whole = state_dict["partition"][rank], state_dict["state"]
        places = {number: place for place, number in enumerate(itertools.chain(*owned))}
        groups = [
            {**_options_of(group), "params": [places[number] for number in members]}
            for group, members in zip(state_dict["param_groups"], owned, strict=True)
        ]
        mine = {places.get(key, key): entry for key, entry in whole.items() if key in places or type(key) is not int}
        return {"state": _copied(mine), "param_groups": groups}

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

    def _options(self) -> dict[str, Any]:
        """Return the groups' options, which must be equal on all ranks, by name."""
        groups = enumerate(map(_options_of, self.param_groups))
        return {f"group {g} option {k}": _comparable(v) for g, group in groups for k, v in group.items()}

    def _local_groups(self, rank: int) -> list[Group]:
        """Return a rank's share of each group, which may be empty."""
        groups = []
        for group, owners in zip(self.param_groups, self._owners, strict=True):
            owned = [p for p, owner in zip(group["params"], owners, strict=True) if owner == rank]
            groups.append({**_options_of(group), "params": owned})
        return groups

    def _require_averaging_ranks(self) -> None:
        """Refuse to share updates among ranks whose gradients are not averaged together."""
        groups, ours = [], self._job.ranks()
        if "process_set" in vars(self):
            groups = [vars(self)["process_set"]]
        elif not self._knows_ddps:
            groups, self._knows_ddps = [ddp.process_group for ddp in ddp_over(self._all())], True
        dist = isinstance(self._job, DistributedJob)
        theirs = [(DistributedJob(group) if dist else job_of().of(group)).ranks() for group in groups]
        if theirs and not any({*ours} <= {*ranks} for ranks in theirs):
            raise ConfigError(
                f"gradients are averaged over the ranks {theirs[0]}, but the optimizer is sharded over {ours}, which "
                "would share updates by different gradients; give both the same process group or process set"
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
    if not given or isinstance(given[0], torch.distributed.ProcessGroup):
        return job_of(*given)
    if hasattr(given[0], "process_set_id"):
        return job_of().of(given[0])
    raise TypeError(f"group is a {type(given[0]).__name__}; give a torch.distributed process group or a hvd.ProcessSet")


def _momentum_is_adopted(optimizer: Any) -> bool:
    """Return whether the optimizer was wrapped with a compressor that takes its momentum."""
    compressor = getattr(optimizer, "compression", None) or getattr(optimizer, "_compression", None)
    engine = getattr(compressor, "engine", None)
    return engine is not None and engine.adoption.active


def _checked_class(optimizer_class: Any) -> type[Optimizer]:
    known = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    names = {cls.__name__ for cls in optimizer_class.__mro__} if known else {"none"}
    if names & {"none", "LBFGS", "ZeroRedundancyOptimizer", "DGCMomentum"}:
        raise ConfigError(
            f"optimizer_class is {optimizer_class!r}; give a torch.optim.Optimizer class that updates each parameter "
            "by itself, such as torch.optim.Adam. LBFGS needs all parameters, a sharded optimizer cannot be sharded "
            "again, and DGCMomentum averages gradients: wrap a sharded torch.optim.SGD in DistributedOptimizer instead"
        )
    checked: type[Optimizer] = optimizer_class
    return checked


def _require_shardable(tensors: list[Tensor]) -> None:
    """Refuse parameters that ranks cannot own one by one."""
    kinds = sorted({f"{p.type()} {p.layout}" for p in tensors})
    if len(kinds) > 1 or tensors[0].layout is not torch.strided or tensors[0].is_complex():
        raise LayoutError(
            f"the parameters are {', '.join(kinds)}; allowed are dense, real ones of one type: build one optimizer for "
            "each type, and store a complex parameter as a real one (torch.view_as_real)"
        )
    places = [(p.device, p.data_ptr()) for p in tensors if p.numel()]
    if len(set(places)) < len(places):
        raise LayoutError("two parameters are the same or in the same memory; list each one once")


def _options_of(group: Mapping[str, Any]) -> Group:
    return {key: value for key, value in group.items() if key not in _NO_OPTIONS}


def _comparable(value: object) -> Any:
    """Return an option as a value that JSON knows, to compare it between ranks. Other objects become their type."""

    def plain(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return leaf.detach().tolist()
        return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else f"<{type(leaf).__name__}>"

    return tree_map(plain, value)


def _copied(value: object) -> Any:
    """Return ``value`` with a copy of every tensor in it."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), value)
