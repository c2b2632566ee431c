"""Support for torch.distributed: the ranks of a process group, and their collectives as a transport."""

from __future__ import annotations

import contextlib
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
from dgc.transport.framework import FrameworkTransport

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

UNNAMED = "allreduce.noname"  # the names that Horovod gives to unnamed parameters begin so

_EXIT_PATIENCE = 5.0  # seconds that a process waits for a running collective before it ends

_BEAT = datetime.timedelta(seconds=1)  # how often a thread that waits for another rank checks for the process' end


class DistributedJob(Job):
    """The ranks of a ``torch.distributed`` process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.require_ready()

    @property
    @override
    def members(self) -> dist.ProcessGroup | None:
        return self._group

    @property
    @override
    def included(self) -> bool:
        return self._group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(self._group) >= 0

    @property
    @override
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    @override
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def ranks(self) -> list[int]:
        """Return the global numbers of the group's ranks; only this process' own if it is not in the group."""
        return dist.get_process_group_ranks(self._group or dist.group.WORLD) if self.included else [dist.get_rank()]

    @override
    def require_ready(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "call torch.distributed.init_process_group() first; to broadcast a model under Horovod, call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
            )

    def of(self, process_set: object = None, other: object = None) -> DistributedJob:
        """Return this job; raise an error if a process set or another group is given."""
        if any(given is not None and given is not self._group for given in (process_set, other)):
            raise ConfigError("process_set= is Horovod's; give a torch.distributed process group as group=")
        return self

    @override
    def op_name(self, op: object) -> str:
        names = {dist.ReduceOp.AVG: "average", dist.ReduceOp.SUM: "sum"}
        name = op.lower() if isinstance(op, str) else next((n for o, n in names.items() if o == op), "")
        if name not in names.values():
            raise ConfigError(f'op is {op!r}; gradient compression supports "average" and "sum"')
        return name

    @override
    def gather(self, value: object, question: str) -> list[Any]:
        with contextlib.closing(self.make_transport()) as transport:
            return gather_values(transport, value)

    @override
    def make_transport(self, choice: str | Collectives = "auto") -> Transport:
        if isinstance(choice, Collectives):
            return as_transport(choice)
        if choice not in ("auto", DistributedTransport.name):
            with errors_on_all_ranks(self):
                raise ConfigError(f"transport={choice!r} needs Horovod; under torch.distributed leave it out")
        try:
            return DistributedTransport(self._group)
        except RuntimeError as error:
            raise TransportError(
                f"ranks {self.ranks()} could not meet: {error}. All of them must make the same calls in the same order"
            ) from error

    @override
    def tell(self, error: Exception) -> None:
        with contextlib.closing(self.make_transport()) as transport:
            tell_error(transport, error)

    def broadcast(self, tensors: Iterable[tuple[str, int, torch.Tensor]]) -> Callable[[], None]:
        """For each (name, root, tensor), begin to overwrite the tensor with that of rank ``root``.

        Returns a function that waits for the end. Collective; it uses the job's own group.
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
    """Refuse models that FSDP2 shards only in part, or shards among ranks that exchange gradients with each other.

    Unsharded parameters are allowed if every mesh has only one rank.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    outside = [(name, p) for name, p in trained if not is_sharded(p)]
    split = any(is_sharded(p) and cast("DTensor", p).device_mesh.size() > 1 for _, p in trained)
    if outside and split:
        raise ConfigError(
            f"{', '.join(_shown_parameter(name, p) for name, p in outside)}: no fully_shard() holds these "
            "parameters, and each rank of a node would train them on its own gradient only: apply fully_shard() "
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


# All DDP models. Torch keeps no list of them, and a parameter does not show that it belongs to one.
_ddps: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _remember_ddp(module: torch.nn.Module, name: str, submodule: object) -> None:
    if isinstance(module, DistributedDataParallel):
        _ddps.add(module)


register_module_module_registration_hook(_remember_ddp)


def ddp_over(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the DDP models that hold some of these parameters and were built after the import of this module."""
    ids = {id(p) for p in parameters}
    return [ddp for ddp in list(_ddps) if not ids.isdisjoint(map(id, ddp.parameters()))]


def _shown_parameter(name: str, p: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(p.shape)}" if name.startswith(UNNAMED) else repr(name)


def job_of(group: dist.ProcessGroup | None = None) -> TorchJob:
    """Return the ranks of a process group; without one, Horovod's ranks if it is initialised, else torch's."""
    hvd = sys.modules.get("horovod.torch")
    horovod_runs = hvd is not None and hvd.is_initialized()
    if group is not None or (dist.is_available() and dist.is_initialized() and not horovod_runs):
        return DistributedJob(group)
    return HOROVOD


def require_dense(job: TorchHorovod) -> None:
    """Require that no rank of a process set has a compressor, so that Horovod averages dense gradients. Collective.

    Raises:
        ConfigError: another rank has a compressor, or fails.
    """
    if job.members.process_set_id is not None and job.included and job.size > 1:
        require_no_choice(job.module().rank(), job.gather)


class DistributedTransport(FrameworkTransport):
    """A transport over a new Gloo group: the exchange must not share a group with DDP, FSDP or the script.

    It is defined here, because :mod:`dgc.transport` imports no framework.
    """

    name = "torch.distributed"
    shut_down = "torch.distributed is shut down: stop exchanging before destroy_process_group()"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Make the Gloo group. Collective over the ranks of ``group``, or over all ranks if it is None."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        # dist.new_group() is not used. It names a new group after the number of the rank's groups. This number may
        # differ between ranks, and repeats after a group was destroyed; both would hang.
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # older PyTorch does not accept None
        name, store = f"dgc/{ranks}", dist.distributed_c10d._get_default_store()
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
                "ranks must make equal numbers of steps, and call average() and load_state_dict(), "
                "not only rank 0"
            ) from error.with_traceback(None)

    def close(self) -> None:
        """End the Gloo group; the script's groups stay."""
        super().close()
        self._group.end(0.0)


def _timeout_of(group: dist.ProcessGroup | None) -> datetime.timedelta:
    group = group or dist.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types]
    known = [backend.options._timeout for backend in backends if hasattr(getattr(backend, "options", None), "_timeout")]
    return known[0] if known else dist.default_pg_timeout


class _Group:
    """A Gloo group that ends before the interpreter does.

    Gloo's threads take the GIL to release tensors, some time after ``wait()``. If the interpreter is ending, this
    aborts the process ("terminate called without an active exception"). So the group is dropped before that, and its
    destructor joins the threads. A thread that is still waiting for another rank by then is parked for ever, with all
    its objects, because its return from ``wait()`` would take the GIL, too.
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
                raise error.with_traceback(None) from None  # the frames in the traceback would keep ``work`` alive
            finally:
                del work  # its destructor takes the GIL, which must not happen after end()

    def end(self, patience: float, *, at_exit: bool = False) -> None:
        """Drop the group, unless a collective runs for longer than ``patience`` seconds."""
        if self._in_use.acquire(timeout=patience):
            self._gloo = None
            self._in_use.release()
        elif at_exit:
            self._ending = True
            self._parked.wait(3 * _BEAT.total_seconds())


def _has_ended(work: dist.Work) -> bool:
    """Wait a second for a collective; return whether it has ended."""
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

    Ranks outside the group do nothing.

    Args:
        parameters: ``model.state_dict()``, which also holds buffers, or (name, tensor) pairs.
        root_rank: the rank in the group that sends its values; if a tensor is sharded, it sends its shard.
        group: a process group; None means all ranks.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    tensors = ((name, root_rank, local(t)) for name, t in items if isinstance(t, torch.Tensor))
    job = DistributedJob(group)
    if job.included:
        job.broadcast(tensors)()
