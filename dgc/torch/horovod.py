"""Horovod for torch: its ranks, its collectives as a transport, limits to its waits, and looks into Python frames.

Only Python's frames show three facts that Horovod's and torch's interfaces hide. ``hvd.DistributedOptimizer`` derives a
class from the given optimizer's, builds a new optimizer from its ``param_groups``, and gives a compressor no reference
to the new one. ``hvd.broadcast_optimizer_state`` steps the optimizer with zero gradients, but only on ranks that have
no state yet. ``GradScaler.step`` leaves no trace on an optimizer. No other module of this adapter looks into frames.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from dgc.adapter.job import JOINED, SHUT_DOWN, Horovod
from dgc.core.collectives import Transport
from dgc.core.exchange.stats import Stats
from dgc.errors import ConfigError, StallError, TransportError
from dgc.transport.framework import FrameworkTransport
from dgc.transport.mpi import LIMIT_VARIABLE, longest_wait

# Elements per broadcast: MPI counts are int32.
_PIECE = 2**30

_left_behind: list[object] = []  # tensors that Horovod's thread may still use after an error; see hold()


class TorchHorovod(Horovod):
    """Horovod for torch."""

    framework = "PyTorch"
    module_name = "horovod.torch"
    package = "dgc.torch"

    @override
    def load(self) -> ModuleType:
        import horovod.torch as hvd

        return hvd

    @override
    def module(self, initialized: bool = True) -> ModuleType:
        try:
            return super().module(initialized)
        except ConfigError as error:
            if not initialized or (dist.is_available() and dist.is_initialized()):
                raise
            first = "call torch.distributed.init_process_group() (under torchrun) or hvd.init() (Horovod) first"
            if "hvd.init()" not in str(error):  # more than hvd.init() is missing
                first += f"; for Horovod: {error}"
            raise ConfigError(first) from error

    @override
    def gather_bytes(self, message: np.ndarray, name: str) -> np.ndarray:
        self.module()
        try:
            return _gather_tensor(torch.from_numpy(message), name, self.members).numpy()
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not gather {message.size} bytes ({name}): {error}") from error

    @override
    def own_transport(self) -> Transport:
        return HorovodTransport(self)

    def ranks(self) -> list[int]:
        """Return these ranks' numbers among all ranks."""
        return list(self.members.ranks or range(self.size))

    def broadcast(self, tensors: Iterable[tuple[str, int, torch.Tensor]]) -> Callable[[], None]:
        """For each (name, root, tensor), begin to overwrite the tensor with that of rank ``root``.

        Returns a function that waits for the end. Collective. A name must be the same on all ranks, and no other
        collective may have it at the same time.
        """
        hvd, ranks = self.module(), self.ranks()
        pending: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def wait() -> None:
            for handle, data, flat, _ in pending:
                try:
                    hvd.synchronize(handle)
                except RuntimeError as error:
                    _left_behind.append(pending)
                    raise TransportError(f"Horovod could not broadcast: {error}") from error
                if not data.is_contiguous():
                    data.copy_(flat)

        for name, root, tensor in tensors:
            data = tensor.detach()
            flat = data.contiguous()
            # Not every backend of Horovod supports bfloat16, so its bits are sent as int16.
            carried = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
            for i, piece in enumerate(carried.view(-1).split(_PIECE)):
                holder = hold(piece)
                try:
                    handle = hvd.broadcast_async_(piece, ranks[root], f"{name}.{i}", process_set=self.members)
                except (RuntimeError, ValueError) as error:
                    _left_behind.append(pending)
                    raise TransportError(f"Horovod could not begin the broadcast of {name}: {error}") from error
                pending.append((handle, data, flat, holder))
        return wait


HOROVOD = TorchHorovod()


def _gather_tensor(tensor: torch.Tensor, name: str, process_set: object) -> torch.Tensor:
    """Return the result of hvd.allgather, the ranks' tensors joined along their first dimension; see :func:`hold`."""
    from horovod.torch import mpi_ops

    joined = tensor.new()
    holders = hold(tensor), hold(joined)
    try:
        return mpi_ops.synchronize(mpi_ops._allgather_async(tensor, joined, name, process_set))
    finally:
        del holders


def _deal_tensor(tensor: torch.Tensor, ranks: int, name: str, process_set: object) -> torch.Tensor:
    """Return the result of hvd.alltoall; see :func:`hold`."""
    from horovod.torch import mpi_ops

    dealt, given = tensor.new(), torch.empty(0, dtype=torch.int32)
    received = torch.empty(ranks, dtype=torch.int32)
    holders = [hold(each) for each in (tensor, dealt, given, received)]
    try:
        return mpi_ops.synchronize(mpi_ops._alltoall_async(tensor, given, dealt, received, name, process_set))[0]
    finally:
        del holders


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose gradient is ``tensor``; keep it for as long as Horovod may hold ``tensor``.

    This prevents a deadlock. When the last C++ reference to a tensor goes, PyTorch takes the GIL to release the
    tensor's Python object. At a shutdown, Horovod's thread drops its tensors while it holds the lock of its queue.
    Another thread that has the GIL and waits for this lock would wait for ever. A gradient is safe because its
    parameter refers to it. Our own tensors need such a reference, too.
    """
    holder = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)  # memory for one element
    holder.grad = tensor
    return holder


def wait_for(handles: Iterable[object]) -> None:
    """Wait for collectives that all ranks have begun or will begin."""
    from horovod.torch import mpi_ops

    for handle in handles:
        mpi_ops.synchronize(handle)


class Placeholders:
    """The one-element tensors that Horovod reduces instead of gradients. They are reused."""

    def __init__(self) -> None:
        self._holders: list[torch.Tensor] = []  # for all placeholders, even those that Horovod keeps after an error
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Return a 1.0, (1,) float32, which Horovod will overwrite."""
        if self._free:
            return self._free.pop()
        one = torch.ones(1)
        self._holders.append(hold(one))
        return one

    def give_back(self, placeholder: torch.Tensor, value: float) -> None:
        """Reuse a placeholder. Horovod has left ``value`` in it: mostly 1.0, the average of ones."""
        self._free.append(placeholder if value == 1.0 else placeholder.fill_(1.0))


class HorovodTransport(FrameworkTransport):
    """A transport over the collectives of ``horovod.torch``, on CPU tensors that share memory with the caller's arrays.

    Tensor names are equal on all ranks and repeat from step to step, so that Horovod's response cache finds them. They
    contain the size, because another size under the same name would miss that cache. One call takes about 2 ms on MPI;
    most of this is Horovod's cycle time and its polling.

    Horovod may fuse a large sum with other tensors that are sent at the same time. So the sum's last bits can differ
    between two runs, but never between ranks.
    """

    name, shut_down = "horovod", SHUT_DOWN

    def __init__(self, job: TorchHorovod = HOROVOD) -> None:
        self._hvd, self._members = job.module(), job.require_member()
        super().__init__(job.rank, job.size)
        self._prefix = job.unique_name("dgc.transport")

    def _gather(self, message: np.ndarray) -> np.ndarray:
        # Copy read-only memory: torch would warn about it, although nothing writes here.
        tensor = torch.from_numpy(message if message.flags.writeable else message.copy())
        return self._run(lambda name: _gather_tensor(tensor, name, self._members), f"allgather.{message.size}").numpy()

    def _deal(self, message: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(message)
        kind = f"alltoall.{message.size}"
        return self._run(lambda name: _deal_tensor(tensor, self.size, name, self._members), kind).numpy()

    def _sum(self, array: np.ndarray) -> None:
        tensor = torch.from_numpy(array)
        holder = hold(tensor)

        def reduce(name: str) -> torch.Tensor:
            op, members = self._hvd.Sum, self._members
            return self._hvd.synchronize(self._hvd.allreduce_async_(tensor, name=name, op=op, process_set=members))

        self._run(reduce, f"allreduce.{array.dtype.name}.{array.size}")
        del holder

    def _is_running(self) -> bool:
        return self._hvd.is_initialized()

    def _run(self, collective: Callable[[str], torch.Tensor], kind: str) -> torch.Tensor:
        name = f"{self._prefix}.{kind}"
        try:
            return collective(name)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod's collective {name} failed: {error}") from error


class Heartbeat:
    """Sums a 1.0 from every rank at the beginning of each step, if Horovod's collectives are the transport.

    A rank that has called ``hvd.join()`` answers an allreduce with zeros, but an allgather with an error that ends the
    rank. ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, if set, limits the wait for the sum. Horovod's own inspector does not
    check operations that are in the ranks' caches, and this operation is there after the first step.
    """

    def __init__(self, job: TorchHorovod, stats: Callable[[], Stats]) -> None:
        """Agree on a name. Collective over the job's ranks."""
        self._limit = longest_wait(LIMIT_VARIABLE, float("inf"))
        self._job, self._stats, self._size = job, stats, job.size
        self._name = job.unique_name("dgc.heartbeat")
        self._one = torch.ones(1)
        self._holder = hold(self._one)

    def __call__(self) -> None:
        """Count the ranks; raise an error unless all of them take part."""
        hvd = self._job.module(initialized=False)
        self._stats().beside += self._one.nbytes
        deadline = time.monotonic() + self._limit
        try:
            handle = hvd.allreduce_async_(
                self._one.fill_(1.0), name=self._name, op=hvd.Sum, process_set=self._job.members
            )
            while self._limit != float("inf") and not hvd.poll(handle):
                if time.monotonic() > deadline:
                    raise StallError(
                        f"rank {hvd.rank()} gives up at the beginning of a step: it has waited {self._limit:g} s for a "
                        "rank that is busy with something else (an evaluation, a checkpoint of this rank only), "
                        "stopped, or cut off. Every rank must make the same steps, the same calls to "
                        "average() and the same loads, in the same order; with fewer batches it must call "
                        "dgc.torch.join(compression). "
                        f"{LIMIT_VARIABLE} is the longest wait in seconds (0: for ever)"
                    )
                time.sleep(0.5e-3)
            total = float(hvd.synchronize(handle))
        except (RuntimeError, ValueError, TypeError) as error:
            if hvd.is_initialized():
                raise
            # After a shutdown, Horovod's own error only says that a handle was not created.
            raise TransportError(SHUT_DOWN) from error
        if round(total) != self._size:
            raise ConfigError(f"only {total:g} of {self._size} ranks exchange gradients: {JOINED}")


# The most frames between Horovod's optimizer and a compressor or a list of groups.
_NEAR = 8

# The most frames between ``broadcast_optimizer_state`` or ``GradScaler.step`` and a step hook.
_FAR = 12

Owned = Callable[[torch.optim.Optimizer], None]


class _Announcing(list[dict[str, Any]]):
    """``param_groups`` that report the optimizer when Horovod builds it from them."""

    base: weakref.ref[torch.optim.Optimizer]
    report: weakref.WeakMethod[Owned]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Report the optimizer that is being built. Its constructor iterates over the groups to copy them."""
        base, report = self.base(), self.report()
        if base is not None and report is not None:
            built = _caller(lambda found: _is_being_built(found, base))
            if built is not None:
                base.param_groups = list(list.__iter__(self))
                report(built)
        return list.__iter__(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Copy the groups as a plain list, which belongs to no optimizer."""
        return list, (list(self),)


def announce_owner(base: torch.optim.Optimizer, report: Owned) -> None:
    """Call ``report`` with the optimizer that Horovod is going to build from ``base``, as soon as it exists.

    Do nothing if the groups are not a plain list. In this case, the optimizer is found at its first gradient.
    """
    if type(base.param_groups) is not list:
        return
    groups = _Announcing(base.param_groups)
    groups.base, groups.report = weakref.ref(base), weakref.WeakMethod(report)
    base.param_groups = groups


def find_owner(compressor: object) -> torch.optim.Optimizer:
    """Return the Horovod optimizer that is calling ``compress()``."""
    owner = _caller(lambda found: getattr(found, "_compression", None) is compressor)
    if owner is None:
        raise ConfigError("compress() was not called by a Horovod DistributedOptimizer for PyTorch")
    return owner


def broadcasting() -> bool:
    """Return whether ``hvd.broadcast_optimizer_state`` is among the callers."""
    found = (f for f in _calling_frames(_FAR) if f.f_code.co_name == "broadcast_optimizer_state")
    return any(str(f.f_globals.get("__name__")).startswith("horovod.") for f in found)


def stepping_scaler(kind: type) -> Any:
    """Return the ``GradScaler`` of class ``kind`` that steps an optimizer now; None if none does."""
    stepping = (f for f in _calling_frames(_FAR) if f.f_code.co_name in ("step", "_maybe_opt_step"))
    return next((f.f_locals["self"] for f in stepping if isinstance(f.f_locals.get("self"), kind)), None)


def _calling_frames(limit: int) -> list[FrameType]:
    """Return up to ``limit`` frames of the callers, beginning with the caller's caller."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < limit:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_being_built(found: torch.optim.Optimizer, base: torch.optim.Optimizer) -> bool:
    return (
        found is not base
        and isinstance(found, type(base))
        and hasattr(type(found), "skip_synchronize")
        and not hasattr(found, "_compression")
        and hasattr(found, "_optimizer_state_dict_pre_hooks")
    )


def _caller(wanted: Callable[[torch.optim.Optimizer], bool]) -> torch.optim.Optimizer | None:
    candidates = (frame.f_locals.get("self") for frame in _calling_frames(_NEAR + 1))
    return next((c for c in candidates if isinstance(c, torch.optim.Optimizer) and wanted(c)), None)
