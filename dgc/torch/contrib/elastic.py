"""Elastic Horovod: a state that includes the compressor, and the decorator for it.

state = dgc.torch.elastic.TorchState(model=model, optimizer=torch.optim.SGD(...), compression=dgc.Compression.dgc(...))

All ranks, old and new, meet only at the start of the decorated function. So each group of ranks wraps the optimizer
there; outside of the function it is a plain optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from typing_extensions import override

from dgc.core.collectives import gather_values
from dgc.core.saved import own_arrays
from dgc.errors import ConfigError, StallError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.horovod import HOROVOD
from dgc.torch.optimizer import DistributedOptimizer, unwrap
from dgc.torch.packing import broadcast_packed, packed, unpacked

State = dict[str, Any]


class TorchState(hvd.elastic.TorchState):
    """``hvd.elastic.TorchState`` of a model, its plain optimizer, a compressor and the script's own values.

    The residuals of a rank that leaves are lost, and rank 0 warns. The ranks go on with the mean of the others'.

    Attributes:
        compression: the compressor; None outside of the decorated function.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        compression: DGCCompressor,
        wrapping: dict[str, Any] | None = None,
        **values: object,
    ) -> None:
        """Take the objects that are committed and restored together.

        Args:
            model: the model.
            optimizer: its optimizer, not wrapped.
            compression: a compressor that is not bound.
            wrapping: further arguments of ``dgc.torch.DistributedOptimizer``.
            values: values of the script, such as ``epoch=0``.
        """
        self._unbound, self._wrapping = compression, wrapping or {}
        self._committed: State | None = None
        super().__init__(model=model, optimizer=optimizer, **values)
        self.compression: DGCCompressor | None = None

    def begin(self) -> None:
        """Wrap the optimizer and load the committed states. Collective."""
        self.compression = copy.copy(self._unbound)
        HOROVOD.elastic = True
        try:
            named = self.model.named_parameters()
            DistributedOptimizer(self.optimizer, named, compression=self.compression, **self._wrapping)
        finally:
            HOROVOD.elastic = False
        engine = self.compression.engine
        if engine is not None and engine.between is not engine.transport:
            raise ConfigError("an elastic job exchanges between ranks: leave out hierarchical=... of the compressor")
        found = self._committed if engine is None else _means(self._committed, self.compression)
        if found is not None and self.compression.takes_part:
            self.compression.load_state_dict(found)

    def end(self) -> None:
        """Make the optimizer a plain one again."""
        if self.compression is not None:
            self.compression = None
            unwrap(self.optimizer)

    def sync(self) -> None:
        """Broadcast everything but the compressor's state, which :meth:`begin` loads."""
        with _lost_ranks_told():  # hvd.elastic.run calls this method itself
            self._broadcast()

    def _broadcast(self) -> None:
        # Send the options here. Horovod sends them in float32, and not at all if the optimizer has no state; then it
        # calls step() to create one.
        groups = self.optimizer.param_groups
        own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        options = unpacked(broadcast_packed(HOROVOD, packed(own, "an optimizer's group"), 0))
        for group in groups:
            group["weight_decay"] = 0.0  # otherwise SGD's new buffers would contain decay
        with _parameters_kept(self.optimizer):
            super().sync()
        for group, came in zip(groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(came, params=params)

    @override
    def save(self) -> None:
        """Commit. With step-ahead error feedback, model and optimizer become equal on all ranks before; collective."""
        if self.compression is not None and self.compression.config.steps_ahead:
            self.compression.average(self.optimizer)
        super().save()
        if self.compression is not None:  # one process keeps no residuals, and must drop those committed earlier
            self._committed, engine = None, self.compression.engine
            if engine is not None:
                self._committed = {**self.compression.state_dict(own=True), "size": engine.transport.size}


@contextlib.contextmanager
def _parameters_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo what steps in the ``with`` block do to the parameters: decay moves them even if all gradients are 0."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(*_: object) -> None:
        before[:] = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def put_back(*_: object) -> None:
        for p, value in before:
            p.copy_(value)
        before.clear()

    hooks = optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(put_back)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a :class:`TorchState`, as ``hvd.elastic.run`` does."""

    @functools.wraps(function)
    def bound(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        try:
            with _lost_ranks_told():
                state.begin()
                return function(state, *args, **kwargs)
        finally:
            state.end()

    return hvd.elastic.run(bound)


@contextlib.contextmanager
def _lost_ranks_told() -> Iterator[None]:
    """Raise Horovod's own error if a rank is gone: ``hvd.elastic.run`` goes on after this error, and after no other.

    Any other error would come again with the same ranks. It ends the job.
    """
    try:
        yield
    except TransportError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (HorovodInternalError, StallError)):
            cause = cause.__cause__
        if cause is None:
            raise
        raise HorovodInternalError(str(error)) from error


def _means(own: State | None, compression: DGCCompressor) -> State | None:
    """Return the means of the committed residuals and momentum; None if rank 0 has committed nothing. Collective.

    A rank that left counts as one without residuals. So does a rank whose last committed step differs from rank 0's.
    """
    assert compression.engine is not None
    transport = compression.engine.transport
    coded = [name for name, entry in own["parameters"].items() if "error" in entry] if own else []
    ranks = gather_values(transport, own and [own["step"], own["size"], own.get("noise"), coded])
    if ranks[0] is None:
        return None
    step, old_size, noise, _ = ranks[0]
    holders = [each is not None and each[:2] == [step, old_size] for each in ranks]
    if sum(holders) < old_size and transport.rank == 0:
        warnings.warn(
            f"{old_size - sum(holders)} of {old_size} ranks left, and with them what they had not sent until step "
            f"{step}",
            RuntimeWarning,
            stacklevel=2,
        )
    state = {**compression.state_dict(), "step": step, "size": old_size, **({} if noise is None else {"noise": noise})}
    for name, entry in state["parameters"].items():
        if any(each is not None and name in each[3] for each in ranks):
            entry["error"] = np.zeros(len(entry["u"]), np.float32)
        differ = own_arrays(entry, is_shared=step <= compression.config.rampup_begin_step)
        mine = own["parameters"][name] if own is not None and holders[transport.rank] else {}
        for key in sorted({"u", "v", "error"} & set(entry)):
            total = np.array(mine.get(key, entry[key]))
            transport.allreduce(total, "sum")
            entry[key] = total / total.dtype.type(old_size if key in differ else sum(holders))
    return state
