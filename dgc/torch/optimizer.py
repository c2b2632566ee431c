"""``dgc.torch.DistributedOptimizer``: the user's optimizer, whose gradients are compressed and averaged.

A hook on each parameter hands its gradient over as soon as the backward pass has computed it. A hook before the
optimizer's ``step()`` waits for the results, which are in ``.grad`` then. The optimizer stays the object that it was.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast, overload

import torch
from typing_extensions import override

from dgc.adapter.checks import check_passes, check_predivide, refuse_grouping
from dgc.adapter.compressor import check_compression, horovods
from dgc.adapter.job import errors_on_all_ranks
from dgc.adapter.options import Compressing
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.compressor import Compression, DGCCompressor, check_optimizer, named_pairs
from dgc.torch.dense import DenseSteps, agree, dense_type
from dgc.torch.distributed import DistributedJob, job_of, require_dense, require_own_shards
from dgc.torch.engine import Engine
from dgc.torch.front_end import FrontEnd, only_makes_state
from dgc.torch.horovod import HOROVOD, TorchHorovod
from dgc.torch.optimizer_methods import HandedOver, OptimizerMethods, refuse_copy
from dgc.torch.tensors import local, scattered_values, set_memory
from dgc.torch.untraced import untraced, weakly

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Methods:
        """What :func:`DistributedOptimizer` adds to the user's optimizer."""

        compression: DGCCompressor
        backward_passes_per_step: int
        op: str
        process_set: Any

        def synchronize(self) -> None:
            """Exchange the gradients, and wait for the results."""

        def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
            """Let ``step()`` inside exchange nothing."""

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Add up the gradients of so many backward passes before each exchange."""

    # No classes of any object: types of the user's optimizer with Horovod's methods.
    class HorovodOptimizer(_Methods, torch.optim.Optimizer): ...  # noqa: D101

    class HorovodSGD(_Methods, torch.optim.SGD): ...  # noqa: D101

    class HorovodAdam(_Methods, torch.optim.Adam): ...  # noqa: D101

    class HorovodAdamW(_Methods, torch.optim.AdamW): ...  # noqa: D101

    Named = Iterable[tuple[str, torch.Tensor]] | None

    class Rest(TypedDict, total=False):
        """The other arguments of :func:`DistributedOptimizer`."""

        backward_passes_per_step: int
        op: object
        gradient_predivide_factor: float
        num_groups: int
        groups: object
        sparse_as_dense: bool
        process_set: Any
        group: Any


@overload
def DistributedOptimizer(
    optimizer: torch.optim.SGD,
    named_parameters: Named = None,
    compression: Compressing = None,
    **rest: Unpack[Rest],
) -> HorovodSGD: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.AdamW,
    named_parameters: Named = None,
    compression: Compressing = None,
    **rest: Unpack[Rest],
) -> HorovodAdamW: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Adam,
    named_parameters: Named = None,
    compression: Compressing = None,
    **rest: Unpack[Rest],
) -> HorovodAdam: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named = None,
    compression: Compressing = None,
    **rest: Unpack[Rest],
) -> HorovodOptimizer: ...
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named = None,
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
    """Let an optimizer average its gradients, compressed, while the backward pass goes on.

    Arguments are those of ``horovod.torch.DistributedOptimizer``, and ``group``: a ``torch.distributed`` process group
    whose ranks exchange. Without it, these are Horovod's where ``hvd.init()`` was called, else all of
    ``torch.distributed``, for which neither Horovod nor MPI is needed.

    With ``compression=dgc.Compression.dgc(...)`` the compressor is bound to the optimizer's parameters here
    (collective). Without ``compression``, and with ``dgc.Compression.none`` or ``.fp16``, gradients are averaged as
    they are or as float16, as DistributedDataParallel does it. In a job of Horovod's it averages these itself, and
    takes compressors of its own.

    Returns:
        The optimizer itself, with Horovod's ``synchronize()``, ``skip_synchronize()``, ``zero_grad()`` and
        ``set_backward_passes_per_step()``, and the compressor as its attribute ``compression``.

    Raises:
        ConfigError: arguments that do not fit together, a compressor that is in use, or no plain optimizer.
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
        engine, scaler = compression.engine, compression.given_options.get("loss_scale")
        steps = None if engine is None else OptimizerFrontEnd(optimizer, engine, sparse_as_dense, scaler)
        vars(optimizer).update(_methods(optimizer, steps))
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
    averages = op == "average"
    dense_steps = DenseSteps(optimizer, named, job, kind == "fp16", averages, sparse_as_dense) if exchanges else None
    vars(optimizer).update(_methods(optimizer, dense_steps))
    return cast("HorovodOptimizer", optimizer)


def _methods(optimizer: torch.optim.Optimizer, steps: OptimizerFrontEnd | DenseSteps | None) -> dict[str, object]:
    """Horovod's methods, by name; ``steps`` is None where nothing is exchanged."""
    if steps is None:
        itself = weakref.proxy(optimizer)
        return {
            "synchronize": lambda: None,
            "skip_synchronize": contextlib.nullcontext,
            "set_backward_passes_per_step": lambda passes: setattr(itself, "backward_passes_per_step", passes),
        }
    names = ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad")
    return {name: getattr(steps, name) for name in names}


class OptimizerFrontEnd(OptimizerMethods, FrontEnd):
    """Hands one optimizer's gradients to the engine, and its results back before each step."""

    drives = holds = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, sparse_as_dense: bool, scaler: object = None
    ) -> None:
        """Register hooks on the engine's parameters; their optimizer keeps this object alive."""
        super().__init__(engine)
        self._scaler = scaler
        self._dense = range(len(engine.parameters)) if sparse_as_dense else engine.excluded
        self.drive(optimizer, self.arrived)
        self.count_passes(engine.parameters, engine.names)

    # -- gradients and results -----------------------------------------------------------------------------------------

    @override
    def step_begins(self, index: int | None) -> None:
        self.update_ended()
        self.engine.refuse_results(index)

    @override
    def hand_over(self, index: int, p: torch.Tensor) -> None:
        if absent := p.grad is None:
            p.grad = torch.zeros_like(p)  # frozen or unused on this rank in this step; the others may have used it
        gradient = p.grad
        if gradient.is_sparse and index in self._dense:
            gradient = gradient.to_dense()
        result = self.engine.submit(index, gradient, absent=absent)
        values = scattered_values(p.grad) if index in self._sharded else None
        self._handed[index] = HandedOver(p.grad, p.grad._version, result, values)

    @override
    def deliver(self) -> None:
        engine = self.engine
        engine.finish()
        for i, handed in self._handed.items():
            if i in engine.left_alone:
                self._parameters[i].grad = None
            elif handed.result is not self._parameters[i].grad:
                _deliver(self._parameters[i], handed.result)

    @override
    def results_are_there(self) -> bool:
        engine: Engine = self.engine
        if not engine.hands_back():
            return False
        for i, p in enumerate(self._parameters):
            if p.grad is None and i not in engine.left_alone:
                p.grad = torch.zeros_like(p)  # taken out of the step by hand
        return True

    @untraced
    @override
    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        super().zero_grad(*args, **kwargs)
        self.engine.results_cleared()

    @override
    def fail(self, error: DGCError, index: int | None = None) -> NoReturn:
        engine: Engine = self.engine
        engine.fail(error, index)

    # -- around step() -------------------------------------------------------------------------------------------------

    @override
    def ends_in_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return vars(optimizer)["synchronize"] == self.synchronize and not self._skipping

    @override
    def end_exchange(self) -> None:
        optimizer = self.owner
        assert optimizer is not None, "it steps"
        exchanging = self.first_handed_over()
        if self._skipping:
            if exchanging is not None:
                wrong = "step() inside optimizer.skip_synchronize(): call optimizer.synchronize() first"
                self.engine.fail(LayoutError(wrong))
            return
        if not self.begun and only_makes_state(optimizer, self._parameters):
            self.saved.made_state()
            return
        if exchanging is not None and self.by_scaler:
            # Its own step() has divided gradients by its scale, with no new version, where unscale_() has not.
            self.fail_changed(exchanging)
        if self.averaged:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Put step() into it: the gradients are averaged already",
                stacklevel=6,
            )
        vars(optimizer)["synchronize"]()

    @override
    def end_exchange_of_closure(self) -> None:
        if self.begun:
            self.synchronize()

    @override
    def end(self) -> None:
        super().end()
        self.unguard()
        self.give_up()
        if (optimizer := self.owner) is not None:
            optimizer.register_step_pre_hook(weakly(self._refuse_step))

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if vars(optimizer).get("synchronize") == self.synchronize:  # elastic jobs take the methods away
            raise ConfigError(
                "the compressor of this optimizer was closed, and its gradients are not averaged any more: build a "
                "new optimizer"
            )


def _deliver(p: torch.Tensor, result: torch.Tensor) -> None:
    """Let ``.grad`` hold a result that lies elsewhere."""
    if p.grad is None:
        return
    gradient = local(p.grad)
    if gradient.is_sparse:
        gradient.zero_().add_(result.to_sparse())
    else:
        set_memory(gradient, result)
