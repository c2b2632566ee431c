"""torch.distributed beside Horovod: the ranks of a process group, and their collectives as a transport."""

from __future__ import annotations

import datetime
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from dgc.adapter.horovod import Ranks
from dgc.core.transport import Collectives, Transport, as_transport
from dgc.errors import ConfigError, TransportError
from dgc.torch.engine.horovod import choice as choice_of_horovod
from dgc.torch.engine.horovod.horovod import HOROVOD
from dgc.torch.engine.tensors import is_sharded, local
from dgc.transport.agreement import tell_error
from dgc.transport.choice import require_no_choice
from dgc.transport.horovod import HorovodTransportBase

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TIMEOUT = datetime.timedelta(seconds=600)
"""Longest wait for another rank in a collective."""

_EXIT_PATIENCE = 5.0
"""Seconds that a process which ends waits for a collective under way."""


class ProcessGroup:
    """The ranks of a ``torch.distributed`` process group, with the members that a compressor asks Horovod for."""

    process_set_id = None

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a group, or all ranks if None.

        Raises:
            ConfigError: torch.distributed is missing or not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("call torch.distributed.init_process_group() before a compressor is bound")
        self.group = group

    def included(self) -> bool:
        """Whether this process is in the group."""
        return self.group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(self.group) >= 0

    def rank(self) -> int:
        """This process' rank in the group."""
        return dist.get_rank(self.group)

    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    def members(self) -> list[int]:
        """Global ranks of the group; of this process alone where it is not in it."""
        return dist.get_process_group_ranks(self.group) if self.included() else [dist.get_rank()]

    # -- as dgc.adapter.horovod.Horovod has it ---------------------------------------------------------------------

    def require_ready(self) -> None:
        """The constructor has checked that."""

    def chosen_set(self, own: object = None, other: object = None) -> ProcessGroup:
        """This group; a Horovod process set beside it is an error.

        Raises:
            ConfigError: one is given.
        """
        if (own or other) not in (None, self):
            raise ConfigError("process_set= is Horovod's; give a torch.distributed process group as group=")
        return self

    def member_set(self, process_set: object = None) -> ProcessGroup:
        """The group itself."""
        return self

    def op_name(self, op: object) -> str:
        """The name of a reduce op, as the core calls it.

        Raises:
            ConfigError: neither average nor sum.
        """
        names = {dist.ReduceOp.AVG: "average", dist.ReduceOp.SUM: "sum"}
        name = op.lower() if isinstance(op, str) else next((n for o, n in names.items() if o == op), "")
        if name not in names.values():
            raise ConfigError(f'op is {op!r}; gradient compression supports "average" and "sum"')
        return name


def require_own_shards(named: Iterable[tuple[str, torch.Tensor]], ranks: object) -> None:
    """Refuse FSDP2's parameters unless they are sharded among other ranks than those that exchange.

    Args:
        named: (name, parameter) pairs.
        ranks: that exchange.

    Raises:
        ConfigError: on every rank.
    """
    for name, p in named:
        if not is_sharded(p):
            continue
        group = ranks.members() if isinstance(ranks, ProcessGroup) else range(dist.get_world_size())
        mesh = cast("DTensor", p).device_mesh.mesh.flatten().tolist()
        if common := sorted({*mesh} & {*group} - {dist.get_rank()}):
            raise ConfigError(
                f"{name!r} is sharded or averaged by FSDP among ranks {sorted(mesh)}, and its gradients would be "
                f"averaged once more with ranks {common}: give fully_shard() a mesh of the ranks of one node, "
                'mesh=mesh["shard"], and dgc.torch.DistributedOptimizer group=mesh["replicate"].get_group()'
            )


def ranks_of_job(group: dist.ProcessGroup | None = None) -> Ranks:
    """Which ranks exchange: those of a process group; without one Horovod's if it is initialised, else torch's.

    Raises:
        ConfigError: a group is given, and torch.distributed is not initialised.
    """
    hvd = sys.modules.get("horovod.torch")
    horovod_runs = hvd is not None and hvd.is_initialized()
    if group is not None or (dist.is_available() and dist.is_initialized() and not horovod_runs):
        return ProcessGroup(group)
    return HOROVOD


def horovod_of_all_ranks(ranks: Ranks, process_set: Any) -> ModuleType:
    """Horovod, which averages dense gradients, on all ranks. Collective over the ranks that will exchange.

    Raises:
        ConfigError: it is missing or not initialised, or another rank has a compressor.
    """
    try:
        hvd = HOROVOD.module()
    except ConfigError as missing:
        error = ConfigError(
            "without a compressor of dgc's gradients are averaged by Horovod; give every rank the same compression= "
            f"or, for dense training under torch.distributed, use DistributedDataParallel: {missing}"
        )
        if isinstance(ranks, ProcessGroup) and ranks.included():
            transport = DistributedTransport(ranks.group)
            tell_error(transport, error)
            transport.close()
        raise error from missing
    members = HOROVOD.chosen_set(process_set)
    if members.process_set_id is not None and members.included() and members.size() > 1:
        require_no_choice(hvd.rank(), members, HOROVOD.gather_values)
    return hvd


def make_transport(choice: str | Collectives, members: Any) -> Transport:
    """Make the transport of Horovod's ranks or a process group's. Collective over ``members``.

    Args:
        choice: "auto", "mpi", "horovod" or a transport; of a process group "auto" or a transport.
        members: a ``hvd.ProcessSet`` or a :class:`ProcessGroup`.

    Raises:
        ConfigError: unknown or differing choices, one that needs Horovod, or this process is not a member.
        TransportError: "mpi" was asked for and some rank cannot use it.
    """
    if not isinstance(members, ProcessGroup):
        return choice_of_horovod.make_transport(choice, members)
    if isinstance(choice, Collectives):
        return as_transport(choice)
    if choice not in ("auto", DistributedTransport.name):
        raise ConfigError(f"transport={choice!r} needs Horovod; under torch.distributed leave it out")
    return DistributedTransport(members.group)


class DistributedTransport(HorovodTransportBase):
    """Collectives of a Gloo group of its own, so that DDP, FSDP and the script share no group with the exchange."""

    name = "torch.distributed"
    shut_down = "torch.distributed is shut down: stop exchanging before destroy_process_group()"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Make the group. Collective over the ranks of ``group``, all ranks if None."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        # Not dist.new_group(): it names a part of the ranks after the number of a rank's groups.
        # Ranks may differ in it, and after a group was destroyed it comes again; both would hang.
        name, store = f"dgc/{dist.get_process_group_ranks(group)}", dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"{name}/{store.add(f'{name} made by {rank}', 1)}", store)
        self._group = _Group(dist.ProcessGroupGloo(store, rank, size, _TIMEOUT))
        weakref.finalize(self, self._group.end, _EXIT_PATIENCE)
        super().__init__(rank, size)

    def _gather(self, message: np.ndarray) -> np.ndarray:
        own = torch.from_numpy(message if message.flags.writeable else message.copy())
        out = torch.empty(self.size * message.size, dtype=torch.uint8)
        self._run(lambda group: group._allgather_base(out, own))
        return out.numpy()

    def _sum(self, array: np.ndarray) -> None:
        self._run(lambda group: group.allreduce([torch.from_numpy(array)]))

    def _is_running(self) -> bool:
        return dist.is_initialized()

    def _run(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        try:
            self._group.run(start)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"a collective of torch.distributed failed: {error}") from error

    def close(self) -> None:
        """End the group of its own; the others go on."""
        super().close()
        self._group.end(0.0)


class _Group:
    """A Gloo group that ends before the interpreter does.

    Gloo's threads take the GIL to release tensors, some time after ``wait()``; once the interpreter ends that aborts
    the process. The group's destructor joins them.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo: dist.ProcessGroupGloo | None = gloo
        self._in_use = threading.Lock()

    def run(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        """Run a collective to its end."""
        with self._in_use:
            if self._gloo is None:
                raise RuntimeError("this process is ending")
            start(self._gloo).wait()

    def end(self, patience: float) -> None:
        """Drop the group, unless a collective is under way for longer than ``patience`` seconds."""
        if self._in_use.acquire(timeout=patience):
            self._gloo = None
            self._in_use.release()


def broadcast_parameters(
    parameters: Mapping[str, object] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite tensors on all ranks with those of one rank, by torch.distributed. Collective over ``group``.

    Args:
        parameters: ``model.state_dict()``, which holds buffers as well, or (name, tensor) pairs.
        root_rank: rank in the group whose values are sent; of sharded tensors its shards.
        group: a process group; all ranks if None.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    ProcessGroup(group)
    root = root_rank if group is None else dist.get_global_rank(group, root_rank)
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    for _, tensor in items:
        if isinstance(tensor, torch.Tensor):
            dist.broadcast(local(tensor).detach(), root, group=group)
