"""Let the user's optimizer compress and average its gradients: ``dgc.torch.DistributedOptimizer``.

It returns the user's own optimizer object. An :class:`~dgc.torch.optimizer_front_end.OptimizerFrontEnd` registers hooks
on the parameters and around ``step()``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from dgc.adapter.checks import check_passes, check_predivide, refuse_grouping
from dgc.adapter.compressor import check_compression, horovods
from dgc.adapter.job import errors_on_all_ranks
from dgc.adapter.options import Compressing
from dgc.torch.compressor import Compression, DGCCompressor, check_optimizer, named_pairs
from dgc.torch.dense import DenseEngine, agree, dense_type
from dgc.torch.distributed import DistributedJob, job_of, require_dense, require_own_shards
from dgc.torch.horovod import HOROVOD, TorchHorovod
from dgc.torch.optimizer_front_end import OptimizerFrontEnd, refuse_copy

if TYPE_CHECKING:
    # For type checkers only, never instantiated. A checker cannot express that the user's optimizer keeps its class. So
    # this class derives from three of torch's, and a variable of type SGD, Adam or AdamW may hold the result.
    class HorovodOptimizer(torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam):  # type: ignore[misc]
        """The user's optimizer, with the methods that :func:`DistributedOptimizer` adds."""

        compression: DGCCompressor
        backward_passes_per_step: int
        op: str
        process_set: Any

        def synchronize(self) -> None:
            """Exchange the gradients, and wait for the results."""

        def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
            """Let ``step()`` exchange nothing inside the ``with`` block."""

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Add up the gradients of this number of backward passes before each exchange."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = None,
    backward_passes_per_step: int = 1,
    op: object = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    group: Any = None,
) -> HorovodOptimizer:
    """Let an optimizer compress and average its gradients during the backward pass.

    Arguments are those of ``horovod.torch.DistributedOptimizer``, and ``group``: the ``torch.distributed`` process
    group whose ranks exchange gradients. Without ``group``, all ranks of Horovod exchange gradients if ``hvd.init()``
    was called, otherwise all ranks of ``torch.distributed``, which needs neither Horovod nor MPI.

    With ``compression=dgc.Compression.dgc(...)`` this call binds the compressor to the optimizer's parameters
    (collective). Without ``compression``, and with ``dgc.Compression.none`` or ``.fp16``, gradients are averaged in
    their own type or as float16, as by DistributedDataParallel. In a Horovod job Horovod averages these itself, and
    its own compressors can be given.

    Returns:
        The optimizer itself, with Horovod's ``synchronize()``, ``skip_synchronize()``, ``zero_grad()`` and
        ``set_backward_passes_per_step()``, and the compressor as its attribute ``compression``.

    Raises:
        ConfigError: arguments do not fit together, the compressor is in use, or this is not a plain optimizer.
        LayoutError: ranks disagree about the parameters.
    """
    job = job_of(group)

    def checked_names() -> list[tuple[str, torch.Tensor]]:
        check_compression(compression, DGCCompressor, "dgc.torch")
        check_optimizer(optimizer, named_parameters)
        check_passes(backward_passes_per_step)
        return named_pairs(optimizer, named_parameters)

    if not isinstance(compression, DGCCompressor) and isinstance(job, TorchHorovod):
        with errors_on_all_ranks(job, process_set):
            named = checked_names()
            hvd, theirs = HOROVOD.module(), job.of(process_set)
            op = hvd.Average if op is None else HOROVOD.reduce_op(op)
        require_dense(theirs)
        dense: HorovodOptimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=None if named_parameters is None else named,
            compression=horovods(compression) or hvd.Compression.none,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=theirs.members,
        )
        return dense
    attributes: dict[str, object] = {
        "sparse_as_dense": sparse_as_dense,
        "gradient_predivide_factor": gradient_predivide_factor,
        "backward_passes_per_step": backward_passes_per_step,
        "__reduce_ex__": refuse_copy,
    }
    if isinstance(compression, DGCCompressor):
        if isinstance(job, DistributedJob):
            compression.use_job(job)
        with compression.errors_on_all_ranks(process_set):
            named = checked_names()
            refuse_grouping(num_groups, groups)
            if isinstance(job, TorchHorovod):
                HOROVOD.module()
            op = compression.use_op(op, gradient_predivide_factor)
            members = compression.process_set(process_set)
        compression.bind(named, optimizer, members)
        vars(optimizer).update(attributes, compression=compression, op=op, process_set=members)
        if (engine := compression.engine) is None or compression.config.steps_ahead:
            return _alone(optimizer)
        densified = range(len(engine.parameters)) if sparse_as_dense else engine.excluded
        OptimizerFrontEnd(optimizer, engine, densified, compression.given_options.get("loss_scale"))
        return cast("HorovodOptimizer", optimizer)
    assert isinstance(job, DistributedJob)
    exchanges = job.included and job.size > 1
    with errors_on_all_ranks(job, process_set):
        named = checked_names()
        refuse_grouping(num_groups, groups)
        kind, op = dense_type(compression), job.of(process_set).op_name("average" if op is None else op)
        check_predivide(gradient_predivide_factor, op)
        if exchanges:
            require_own_shards(named, job)
    attributes.update(compression=compression or Compression.none, op=op, process_set=job.members)
    if exchanges:
        agree(named, job, kind, op)
    vars(optimizer).update(attributes)
    if not exchanges:
        return _alone(optimizer)
    dense_engine = DenseEngine(named, job, half=kind == "fp16", average=op == "average")
    OptimizerFrontEnd(optimizer, dense_engine, range(len(named) if sparse_as_dense else 0))
    return cast("HorovodOptimizer", optimizer)


# Attributes of a wrapped optimizer that a plain one must not have. The other ones that DistributedOptimizer sets stay,
# because a traceback may keep hooks alive that read backward_passes_per_step.
_OF_WRAPPED = (
    *("compression", "synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad"),
    "__reduce_ex__",
)


def unwrap(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that :func:`DistributedOptimizer` has wrapped a plain one again, and close its compressor.

    It may be wrapped once more, with a new compressor.
    """
    compression = vars(optimizer).get("compression")
    if isinstance(compression, DGCCompressor):
        compression.close()
    for name in _OF_WRAPPED:
        vars(optimizer).pop(name, None)


def _alone(optimizer: torch.optim.Optimizer) -> HorovodOptimizer:
    """Give Horovod's methods to an optimizer in a process that exchanges nothing."""
    itself = weakref.proxy(optimizer)
    vars(optimizer).update(
        synchronize=lambda: None,
        skip_synchronize=contextlib.nullcontext,
        set_backward_passes_per_step=lambda passes: setattr(itself, "backward_passes_per_step", passes),
    )
    return cast("HorovodOptimizer", optimizer)
