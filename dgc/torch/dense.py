"""Dense training under torch.distributed: average gradients in their own type, or as float16.

This is used without Horovod for ``Compression.none``, ``Compression.fp16`` and no ``compression=``. Each bucket of
gradients takes one allreduce of the job's own process group (NCCL, Gloo), which begins during the backward pass. All
ranks begin their buckets in the same order. An error on one rank alone ends the job, as with DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist

from dgc.adapter.agreement import require_agreement
from dgc.adapter.compressor import Uncompressed
from dgc.core.checks import brief
from dgc.core.config import DEFAULT_BUCKET_BYTES
from dgc.errors import ConfigError, DGCError, LayoutError, TransportError
from dgc.torch.distributed import DistributedJob
from dgc.torch.saved_state import Change
from dgc.torch.tensors import local


def dense_type(compression: object) -> str:
    """Return the name of a dense compression of ours or of Horovod's: "none" or "fp16".

    Raises:
        ConfigError: another compression of Horovod's.
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
    """Parameters, by index, of one type and device. One collective adds up their gradients."""

    members: list[int] = field(default_factory=list)
    nbytes: int = 0
    waiting: int = 0
    """The number of gradients that were not submitted yet in this step."""
    work: dist.Work | None = None
    flat: torch.Tensor | None = None
    """The gradients, then a flag for each: whether this rank has it. The sum of flags tells if any rank has it."""


_LATEST: deque[dist.Work] = deque(maxlen=256)
"""This process's latest collectives, which are kept longer than their optimizer.

Gloo's thread drops its reference to a collective some time after ``wait()``. If that were the last reference, and the
collective was begun in a backward pass, the thread would wait for the GIL. A process that ends at that moment would
abort.
"""


def agree(named: Sequence[tuple[str, torch.Tensor]], job: DistributedJob, name: str, op: str) -> None:
    """Check that all ranks will average the same gradients, as "none" or "fp16", with one op. Collective."""
    with contextlib.closing(job.make_transport()) as transport:
        require_agreement(transport, {"algorithm": name, "op": op}, "options of the compressor")
        shown = {n: f"{tuple(local(p).shape)} {p.dtype}" for n, p in named if p.requires_grad}
        require_agreement(transport, shown, "parameters", LayoutError)


class DenseEngine:
    """Serves a front end like an :class:`~dgc.torch.engine.Engine`, with dense sums over one process group.

    Attributes:
        parameters, names: in the order in which a backward pass reaches them: the last parameter is first.
        left_alone: parameters for which no rank had a gradient in the latest step.
    """

    keeps_sparse = False
    by_scaler = True  # a GradScaler may step the optimizer; each step looks for one
    error: DGCError | None = None

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], job: DistributedJob, half: bool, average: bool
    ) -> None:
        """Exchange these named parameters, after :func:`agree`. ``half`` sends float16; ``average`` divides sums."""
        trained = {id(p): (n, p) for n, p in reversed(named) if p.requires_grad}
        self.names, self.parameters = [n for n, _ in trained.values()], [p for _, p in trained.values()]
        self.left_alone: set[int] = set()
        self._group, self._divisor, self._half = job.members, job.size if average else 1, half
        self._buckets = _buckets_of(self.parameters)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self.adoption = self.saved = _Nothing()
        self._begin()

    def _begin(self) -> None:
        self._gradients: dict[int, torch.Tensor] = {}
        self._absent: set[int] = set()  # parameters without a gradient on this rank
        self._begun_buckets = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)

    def submit(self, index: int, gradient: torch.Tensor, *, absent: bool = False) -> torch.Tensor:
        """Submit a gradient, or zeros if it is ``absent`` on this rank. Returns the tensor for the result."""
        if gradient.is_sparse:
            raise ConfigError(
                f"{self.names[index]!r} has sparse gradients: give sparse_as_dense=True to "
                "dgc.torch.DistributedOptimizer, or build the embedding with sparse=False"
            )
        if absent:
            self._absent.add(index)
        self._gradients[index] = gradient
        self._bucket_of[index].waiting -= 1
        while self._begun_buckets < len(self._buckets) and not self._buckets[self._begun_buckets].waiting:
            self._send(self._buckets[self._begun_buckets])
            self._begun_buckets += 1
        return gradient

    def _send(self, bucket: _Bucket) -> None:
        gradients = [local(self._gradients[i]).detach().reshape(-1) for i in bucket.members]
        present = torch.ones(len(gradients), dtype=gradients[0].dtype, device=gradients[0].device)
        for place, i in enumerate(bucket.members):
            if i in self._absent:
                present[place] = 0
        flat = torch.cat([*gradients, present])
        bucket.flat = (flat.half() if self._half else flat).div_(self._divisor)
        with _failing_as_ours():
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for all sums, and write them into the gradients."""
        self.left_alone = set()
        for bucket in self._buckets:
            self._deliver(bucket)
        self._begin()

    def _deliver(self, bucket: _Bucket) -> None:
        """Wait for a bucket's sums. As under DDP, ``.grad`` stays None if no rank has a gradient."""
        assert bucket.flat is not None
        assert bucket.work is not None
        with _failing_as_ours():
            bucket.work.wait()
        gradients = [local(self._gradients[i]) for i in bucket.members]
        *sums, present = bucket.flat.split([*(g.numel() for g in gradients), len(gradients)])
        for place, (i, gradient, total) in enumerate(zip(bucket.members, gradients, sums, strict=True)):
            if i in self._absent and not present[place]:
                self.left_alone.add(i)
            else:
                gradient.copy_(total.view(gradient.shape))
        bucket.flat.set_()  # free its memory, although the collective still refers to the tensor
        if not bucket.flat.is_cuda:
            _LATEST.append(bucket.work)
        bucket.work = bucket.flat = None

    def fail(self, error: DGCError, index: int | None = None) -> NoReturn:
        """Raise an error on this rank only."""
        raise error

    def hands_back(self) -> bool:
        """Return whether another ``synchronize()`` returns the latest results; here always True."""
        return True

    def _do_nothing(self, *_: object) -> None:
        """Results are mean gradients: they may be exchanged again, or dropped. The front end is never called."""

    follow = refuse_results = results_cleared = warn_of_dropped = _do_nothing


class _Nothing:
    """Takes the place of adoption and saved state: dense training leaves all to the optimizer."""

    pending, has_velocity = Change(), False

    def _do_nothing(self, *_: object) -> None: ...

    follow = hide = show = refuse_another = _do_nothing


@contextlib.contextmanager
def _failing_as_ours() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"a collective of torch.distributed failed: {error}") from error


def _buckets_of(parameters: Sequence[torch.Tensor]) -> list[_Bucket]:
    """Divide the parameters, in their order, into buckets of one type and device and of about 25 MiB."""
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
