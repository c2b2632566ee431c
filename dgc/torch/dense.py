"""Dense training under torch.distributed: gradients are averaged as they are, or as float16.

What ``Compression.none``, ``Compression.fp16`` and no ``compression=`` are without Horovod. A bucket of gradients is
one allreduce of the job's own process group (NCCL, Gloo), which begins while the backward pass goes on; all ranks begin
their buckets in the same order. An error on one rank alone ends the job, as with DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dgc.adapter.agreement import require_agreement
from dgc.adapter.compressor import Uncompressed
from dgc.core.checks import brief
from dgc.core.config import DEFAULT_BUCKET_BYTES
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.torch.distributed import DistributedJob
from dgc.torch.front_end import closure_of, only_makes_state, refuse_strange_gradients, with_closure
from dgc.torch.optimizer_methods import HandedOver, OptimizerMethods
from dgc.torch.scaler import steps_by_scaler
from dgc.torch.tensors import local, scattered_values
from dgc.torch.untraced import untraced, weakly


def dense_type(compression: object) -> str:
    """What a dense compression of ours or of Horovod's is called: "none" or "fp16".

    Raises:
        ConfigError: it is another one of Horovod's.
    """
    if compression is None or isinstance(compression, Uncompressed):
        return "none" if compression is None else compression.name
    horovods = getattr(sys.modules.get("horovod.torch"), "Compression", None)
    for name in ("none", "fp16"):
        if compression is getattr(horovods, name, None):
            return name
    raise ConfigError(
        f"compression is {brief(compression)}, which needs Horovod: call hvd.init(), or under torchrun give one of "
        "dgc.torch.Compression"
    )


@dataclass(eq=False)
class _Bucket:
    """Parameters of one type and device, by index, whose gradients are added up by one collective."""

    members: list[int] = field(default_factory=list)
    nbytes: int = 0
    waiting: int = 0
    """Gradients that are not handed over yet in this step."""
    work: dist.Work | None = None
    flat: torch.Tensor | None = None
    """The gradients, and behind them for each whether there is one: their sum tells whether any rank has it."""


_LATEST: deque[dist.Work] = deque(maxlen=256)
"""This process's latest collectives, which outlive their optimizer. Gloo's thread drops one some time after ``wait()``.
If it were the last, it would wait for the GIL where the collective was begun in a backward pass, and that aborts a
process that ends at that moment."""


def agree(named: Sequence[tuple[str, torch.Tensor]], job: DistributedJob, name: str, op: str) -> None:
    """See that all ranks are about to average the same gradients, as "none" or "fp16", with one op. Collective."""
    transport = job.make_transport()
    try:
        require_agreement(transport, {"algorithm": name, "op": op}, "options of the compressor")
        shown = {n: f"{tuple(local(p).shape)} {p.dtype}" for n, p in named if p.requires_grad}
        require_agreement(transport, shown, "parameters", LayoutError)
    finally:
        transport.close()


class DenseSteps(OptimizerMethods):
    """Averages one optimizer's gradients over the ranks of a process group before each step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        job: DistributedJob,
        half: bool,
        average: bool,
        sparse_as_dense: bool,
    ) -> None:
        """Register hooks, after :func:`agree`; the optimizer, whose pairs ``named`` are, keeps this object alive.

        ``half`` sends float16; without ``average`` gradients are added up.
        """
        # The last parameters' gradients are there first.
        trained = {id(p): (n, p) for n, p in reversed(named) if p.requires_grad}
        names, parameters = [n for n, _ in trained.values()], [p for _, p in trained.values()]
        self._group, self._divisor = job.members, job.size if average else 1
        self._half, self._sparse_as_dense = half, sparse_as_dense
        self._buckets = _buckets_of(parameters)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._owner = weakref.ref(optimizer)
        self.count_passes(parameters, names)
        # The public way to give a class's step() torch's hooks again, where a script has replaced it since.
        torch.optim.Optimizer.__setstate__(optimizer, {})
        hooks = [p.register_post_accumulate_grad_hook(weakly(self.arrived, i)) for i, p in enumerate(parameters)]
        hooks.append(optimizer.register_step_pre_hook(weakly(self._before_step)))
        hooks.append(optimizer.register_step_post_hook(weakly(self._after_step)))
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks]).atexit = False

    # -- around the optimizer's step ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange before the optimizer's own update; what a closure computes is exchanged when it returns."""
        closure = closure_of(args, kwargs)
        exchanging = self.first_handed_over()
        if self._skipping:
            if exchanging is not None:
                raise LayoutError("step() inside optimizer.skip_synchronize(): call optimizer.synchronize() first")
        elif self.begun or (closure is None and not only_makes_state(optimizer, self._parameters)):
            if exchanging is not None and steps_by_scaler():
                self.fail_changed(exchanging)  # it has divided gradients by its scale
            vars(optimizer)["synchronize"]()
        refuse_strange_gradients(optimizer, set(map(id, self._parameters)))
        if closure is None:
            return None

        @untraced
        def followed() -> Any:
            loss = closure()
            if self.begun:
                vars(optimizer)["synchronize"]()
            return loss

        return with_closure(args, kwargs, followed)

    def _after_step(self, *_: object) -> None:
        self.averaged = False

    # -- inside ----------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:  # noqa: D102
        super().begin_anew()
        self._begun_buckets = 0
        self._absent: set[int] = set()  # parameters without a gradient on this rank
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)

    def hand_over(self, index: int, p: torch.Tensor) -> None:  # noqa: D102
        if p.grad is None:
            self._absent.add(index)
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            if not self._sparse_as_dense:
                raise ConfigError(
                    f"{self._names[index]!r} has sparse gradients: give sparse_as_dense=True to "
                    "dgc.torch.DistributedOptimizer, or build the embedding with sparse=False"
                )
            p.grad = p.grad.to_dense()
        values = scattered_values(p.grad) if index in self._sharded else None
        self._handed[index] = HandedOver(p.grad, p.grad._version, p.grad, values)
        self._bucket_of[index].waiting -= 1
        while self._begun_buckets < len(self._buckets) and not self._buckets[self._begun_buckets].waiting:
            self._begin(self._buckets[self._begun_buckets])
            self._begun_buckets += 1

    def _begin(self, bucket: _Bucket) -> None:
        """Begin the sum of a bucket, in the order of buckets."""
        gradients = [local(self._handed[i].gradient).detach().reshape(-1) for i in bucket.members]
        present = torch.ones(len(gradients), dtype=gradients[0].dtype, device=gradients[0].device)
        for place, i in enumerate(bucket.members):
            if i in self._absent:
                present[place] = 0
        flat = torch.cat([*gradients, present])
        bucket.flat = (flat.half() if self._half else flat).div_(self._divisor)
        with _failing_as_ours():
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def deliver(self) -> None:  # noqa: D102
        for bucket in self._buckets:
            self._deliver(bucket)

    def _deliver(self, bucket: _Bucket) -> None:
        """Wait for a bucket's sums; a parameter that has no gradient on any rank keeps none, as under DDP."""
        assert bucket.flat is not None
        assert bucket.work is not None
        with _failing_as_ours():
            bucket.work.wait()
        gradients = [self._handed[i].gradient for i in bucket.members]
        *sums, present = bucket.flat.split([*(local(g).numel() for g in gradients), len(gradients)])
        for place, (i, gradient, total) in enumerate(zip(bucket.members, gradients, sums, strict=True)):
            if i in self._absent and not present[place]:
                self._parameters[i].grad = None
            else:
                local(gradient).copy_(total.view(local(gradient).shape))
        bucket.flat.set_()  # gives its memory back: the collective refers to it
        if not bucket.flat.is_cuda:
            _LATEST.append(bucket.work)
        bucket.work = bucket.flat = None


@contextlib.contextmanager
def _failing_as_ours() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"a collective of torch.distributed failed: {error}") from error


def _buckets_of(parameters: Sequence[torch.Tensor]) -> list[_Bucket]:
    """Parameters of one type and device, in their order, of about 25 MiB."""
    buckets: list[_Bucket] = []
    latest: dict[object, _Bucket] = {}
    for index, p in enumerate(parameters):
        kind, size = (p.dtype, p.device), local(p).nbytes
        if kind not in latest or latest[kind].nbytes + size > DEFAULT_BUCKET_BYTES:
            latest[kind] = _Bucket()
            buckets.append(latest[kind])
        latest[kind].members.append(index)
        latest[kind].nbytes += size
    return buckets
