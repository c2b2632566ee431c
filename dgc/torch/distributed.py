"""torch.distributed beside Horovod: the ranks of a process group, and their collectives as a transport."""

from __future__ import annotations

import datetime
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from dgc.adapter.agreement import tell_error
from dgc.adapter.job import Job, errors_on_all_ranks
from dgc.adapter.transport_choice import require_no_choice
from dgc.core.collectives import Collectives, Transport, as_transport, gather_values
from dgc.errors import ConfigError, TransportError
from dgc.torch.horovod import HOROVOD, TorchHorovod
from dgc.torch.tensors import is_sharded, local
from dgc.transport.library import LibraryTransport

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

UNNAMED = "allreduce.noname"
"""How Horovod begins the names of parameters that were given none."""

_EXIT_PATIENCE = 5.0
"""Seconds that a process which ends waits for a collective under way."""

_BEAT = datetime.timedelta(seconds=1)
"""How often a thread that waits for another rank looks whether the process ends."""


class DistributedJob(Job):
    """The ranks of a ``torch.distributed`` process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.require_ready()

    @property
    def members(self) -> dist.ProcessGroup | None:  # noqa: D102
        return self._group

    @property
    def included(self) -> bool:  # noqa: D102
        return self._group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(self._group) >= 0

    @property
    def rank(self) -> int:  # noqa: D102
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:  # noqa: D102
        return dist.get_world_size(self._group)

    def ranks(self) -> list[int]:
        """What these ranks are called among all; this process alone where it is not one of them."""
        return dist.get_process_group_ranks(self._group) if self.included else [dist.get_rank()]

    def require_ready(self) -> None:  # noqa: D102
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("call torch.distributed.init_process_group() before a compressor is bound")

    def of(self, process_set: object = None, other: object = None) -> DistributedJob:
        """This job; a Horovod process set beside it is an error."""
        if any(given is not None and given is not self._group for given in (process_set, other)):
            raise ConfigError("process_set= is Horovod's; give a torch.distributed process group as group=")
        return self

    def op_name(self, op: object) -> str:  # noqa: D102
        names = {dist.ReduceOp.AVG: "average", dist.ReduceOp.SUM: "sum"}
        name = op.lower() if isinstance(op, str) else next((n for o, n in names.items() if o == op), "")
        if name not in names.values():
            raise ConfigError(f'op is {op!r}; gradient compression supports "average" and "sum"')
        return name

    def gather(self, value: object, question: str) -> list[Any]:  # noqa: D102
        transport = self.make_transport()
        try:
            return gather_values(transport, value)
        finally:
            transport.close()

    def make_transport(self, choice: str | Collectives = "auto") -> Transport:  # noqa: D102
        if isinstance(choice, Collectives):
            return as_transport(choice)
        if choice not in ("auto", DistributedTransport.name):
            with errors_on_all_ranks(self):
                raise ConfigError(f"transport={choice!r} needs Horovod; under torch.distributed leave it out")
        try:
            return DistributedTransport(self._group)
        except RuntimeError as error:
            raise TransportError(
                f"ranks {self.ranks()} could not meet: {error}. All of them must make the same calls, in one order"
            ) from error

    def tell(self, error: Exception) -> None:  # noqa: D102
        transport = self.make_transport()
        try:
            tell_error(transport, error)
        finally:
            transport.close()

    def broadcast(self, tensors: Iterable[tuple[str, int, torch.Tensor]]) -> Callable[[], None]:
        """Begin to overwrite (name, root, tensor) with that of the rank ``root`` of this job; call the result to wait.

        Collective, by the job's own group.
        """
        ranks = self.ranks()
        pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

        def wait() -> None:
            for work, data, flat in pending:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise TransportError(f"torch.distributed could not broadcast: {error}") from error
                if not data.is_contiguous():
                    data.copy_(flat)

        for name, root, tensor in tensors:
            data = tensor.detach()
            flat = data.contiguous()
            try:
                pending.append((dist.broadcast(flat, ranks[root], self._group, async_op=True), data, flat))
            except (RuntimeError, ValueError) as error:
                raise TransportError(f"torch.distributed could not begin the broadcast of {name}: {error}") from error
        return wait


TorchJob: TypeAlias = TorchHorovod | DistributedJob


def require_own_shards(named: Iterable[tuple[str, torch.Tensor]], job: Job) -> None:
    """Refuse FSDP2's parameters unless all are sharded, among other ranks than those that exchange.

    Beside shards on a single rank, which are whole, there may be others.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    outside = [(name, p) for name, p in trained if not is_sharded(p)]
    split = any(is_sharded(p) and cast("DTensor", p).device_mesh.size() > 1 for _, p in trained)
    if outside and split:
        raise ConfigError(
            f"{', '.join(_shown_parameter(name, p) for name, p in outside)}: no fully_shard() holds these "
            "parameters, and the ranks of a node would train them apart, each on its own gradient: apply fully_shard() "
            "to the whole model, last, or freeze them"
        )
    for name, p in trained:
        if not is_sharded(p):
            continue
        group = job.ranks() if isinstance(job, DistributedJob) else range(dist.get_world_size())
        mesh = cast("DTensor", p).device_mesh.mesh.flatten().tolist()
        if common := sorted({*mesh} & {*group} - {dist.get_rank()}):
            raise ConfigError(
                f"{name!r} is sharded or averaged by FSDP among ranks {sorted(mesh)}, and its gradients would be "
                f"averaged once more with ranks {common}: give fully_shard() a mesh of the ranks of one node, "
                'mesh=mesh["shard"], and dgc.torch.DistributedOptimizer group=mesh["replicate"].get_group()'
            )


# Torch keeps no list of them, and they leave nothing on a parameter.
_ddps: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _remember_ddp(module: torch.nn.Module, name: str, submodule: object) -> None:
    if isinstance(module, DistributedDataParallel):
        _ddps.add(module)


register_module_module_registration_hook(_remember_ddp)


def ddp_over(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """List the DDP models, built since this module was imported, that hold some of these parameters."""
    ids = {id(p) for p in parameters}
    return [ddp for ddp in list(_ddps) if not ids.isdisjoint(map(id, ddp.parameters()))]


def _shown_parameter(name: str, p: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(p.shape)}" if name.startswith(UNNAMED) else repr(name)


def job_of(group: dist.ProcessGroup | None = None) -> TorchJob:
    """The ranks of a process group; without one Horovod's if it is initialised, else torch's."""
    hvd = sys.modules.get("horovod.torch")
    horovod_runs = hvd is not None and hvd.is_initialized()
    if group is not None or (dist.is_available() and dist.is_initialized() and not horovod_runs):
        return DistributedJob(group)
    return HOROVOD


def require_dense(job: TorchHorovod) -> None:
    """See that Horovod averages dense gradients on all ranks of a process set. Collective over it.

    Raises:
        ConfigError: another rank has a compressor, or fails.
    """
    if job.members.process_set_id is not None and job.included and job.size > 1:
        require_no_choice(job.module().rank(), job.gather)


class DistributedTransport(LibraryTransport):
    """Collectives of a Gloo group of its own, so that DDP, FSDP and the script share no group with the exchange.

    Lies here and not in :mod:`dgc.transport`, which knows no framework.
    """

    name = "torch.distributed"
    shut_down = "torch.distributed is shut down: stop exchanging before destroy_process_group()"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Make the group. Collective over the ranks of ``group``, all ranks if None."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        # Not dist.new_group(): it names a part of the ranks after the number of a rank's groups.
        # Ranks may differ in it, and after a group was destroyed it comes again; both would hang.
        name, store = f"dgc/{dist.get_process_group_ranks(group)}", dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"{name}/{store.add(f'{name} made by {rank}', 1)}", store)
        self._group = _Group(dist.ProcessGroupGloo(store, rank, size, _timeout_of(group)))
        weakref.finalize(self, self._group.end, _EXIT_PATIENCE, at_exit=True)
        super().__init__(rank, size)

    def _gather(self, message: np.ndarray) -> np.ndarray:
        own = torch.from_numpy(message if message.flags.writeable else message.copy())
        out = torch.empty(self.size * message.size, dtype=torch.uint8)
        self._run(lambda group: group._allgather_base(out, own))
        return out.numpy()

    @override
    def gather(self, message: np.ndarray, root: int) -> np.ndarray:
        self._require_open()
        out = torch.empty((self.size if self.rank == root else 0, message.size), dtype=torch.uint8)
        options = dist.GatherOptions()
        options.rootRank = root
        self._run(lambda group: group.gather([list(out)] if len(out) else [], [torch.from_numpy(message)], options))
        return out.numpy()

    def _deal(self, message: np.ndarray) -> np.ndarray:
        out, own = torch.empty(message.size, dtype=torch.uint8), torch.from_numpy(message)
        self._run(lambda group: group.alltoall_base(out, own, [], []))
        return out.numpy()

    def _sum(self, array: np.ndarray) -> None:
        self._run(lambda group: group.allreduce([torch.from_numpy(array)]))

    def _is_running(self) -> bool:
        return dist.is_initialized()

    def _run(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        try:
            self._group.run(start)
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"a collective of torch.distributed failed: {error}. A rank has ended, or is in another call: all "
                "ranks must call save_checkpoint() and load_checkpoint(), not only rank 0"
            ) from error.with_traceback(None)

    def close(self) -> None:
        """End the group of its own; the others go on."""
        super().close()
        self._group.end(0.0)


def _timeout_of(group: dist.ProcessGroup | None) -> datetime.timedelta:
    """Return how long a collective of ``group`` waits for another rank, as given to ``init_process_group()``."""
    group = group or dist.distributed_c10d._get_default_group()
    backends = [group._get_backend(device) for device in group._device_types]
    known = [backend.options._timeout for backend in backends if hasattr(getattr(backend, "options", None), "_timeout")]
    return known[0] if known else dist.default_pg_timeout


class _Group:
    """A Gloo group that ends before the interpreter does.

    Gloo's threads take the GIL to release tensors, some time after ``wait()``; once the interpreter ends that aborts
    the process ("terminate called without an active exception"). The group's destructor joins them. So does a thread
    that comes back from ``wait()`` then. Where another rank does not come, it is parked with all that it holds.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo: dist.ProcessGroupGloo | None = gloo
        self._in_use = threading.Lock()
        self._ending, self._parked = False, threading.Event()

    def run(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        """Run a collective to its end."""
        with self._in_use:
            if self._gloo is None:
                raise RuntimeError("this process is ending")
            work = start(self._gloo)
            try:
                while not _has_ended(work):
                    if self._ending:
                        self._parked.set()
                        threading.Event().wait()
            except RuntimeError as error:
                raise error.with_traceback(None) from None  # its frames have the work
            finally:
                del work  # its destructor takes the GIL again as well, which must not be after :meth:`end`

    def end(self, patience: float, *, at_exit: bool = False) -> None:
        """Drop the group, unless a collective is under way for longer than ``patience`` seconds."""
        if self._in_use.acquire(timeout=patience):
            self._gloo = None
            self._in_use.release()
        elif at_exit:
            self._ending = True
            self._parked.wait(3 * _BEAT.total_seconds())


def _has_ended(work: dist.Work) -> bool:
    """Whether a collective ends soon."""
    try:
        work.wait(_BEAT)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def broadcast_parameters(
    parameters: Mapping[str, object] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite tensors on all ranks with those of one rank, by torch.distributed. Collective over ``group``.

    Ranks outside it do nothing.

    Args:
        parameters: ``model.state_dict()``, which holds buffers as well, or (name, tensor) pairs.
        root_rank: rank in the group whose values are sent; of sharded tensors its shards.
        group: a process group; all ranks if None.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    tensors = ((name, root_rank, local(t)) for name, t in items if isinstance(t, torch.Tensor))
    job = DistributedJob(group)
    if job.included:
        job.broadcast(tensors)()
