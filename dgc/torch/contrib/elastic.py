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

from dgc.adapter.agreement import built_together
from dgc.core.collectives import Transport, gather_values
from dgc.core.saved import old_ranks_of, own_arrays
from dgc.errors import StallError, TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.horovod import HOROVOD
from dgc.torch.optimizer import DistributedOptimizer, unwrap
from dgc.torch.packing import broadcast_packed, gather_packed, packed, unpacked
from dgc.transport.local import local_world

State = dict[str, Any]


class TorchState(hvd.elastic.TorchState):
    """``hvd.elastic.TorchState`` of a model, its plain optimizer, a compressor and the script's own values.

    The residuals of a rank that leaves are lost, and rank 0 warns. Other residuals are redistributed as with
    ``load_state_dict(states, resize=True)``.

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
        compression, engine = self.compression, self.compression.engine
        if not compression.takes_part:
            return
        transport = local_world(1)[0] if engine is None else engine.transport
        if states := _exchanged(self._committed, transport, compression.config.rampup_begin_step):
            compression.load_state_dict(states, resize=True)

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
        if self.compression is not None:
            self.compression.average(self.optimizer)
        super().save()
        if self.compression is not None:  # one process keeps no residuals, and must drop those committed earlier
            self._committed = None if self.compression.engine is None else self.compression.state_dict()


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


def _exchanged(own: State | None, transport: Transport, rampup_begin_step: int) -> list[Any]:
    """Return the old ranks' states, with zeros for ranks that left. ``load_state_dict(resize=True)`` takes them.

    Collective. Entries that this rank does not need are None. A rank whose last committed step differs from rank 0's
    counts as one that left. The list is empty if rank 0 has committed nothing.
    """
    rank, size = transport.rank, transport.size
    places = gather_values(transport, own and [own["step"], own["size"], own["rank"]])
    if places[0] is None:
        return []
    step, old_size, _ = places[0]
    holders = {place[2]: r for r, place in enumerate(places) if place and place[:2] == [step, old_size]}
    _warn_of_lost([r for r in range(old_size) if r not in holders], old_size, step, rank)

    def sources(receiver: int) -> set[int]:
        """Return the ranks that send their states to ``receiver``.

        If ``receiver`` would have no state at all, rank 0 sends its state as a template.
        """
        found = {holders[r] for r in old_ranks_of(receiver, old_size, size) if r in holders}
        return found - {receiver} if receiver in holders.values() else found or {0}

    states: list[Any] = [None] * old_size
    nothing, sends = np.empty(0, np.uint8), any(rank in sources(receiver) for receiver in range(size))
    own_bytes = built_together(transport, lambda: packed(own, "the compressor's state") if sends else nothing)
    for receiver in range(size):
        if needed := sources(receiver):
            for content in gather_packed(transport, own_bytes if rank in needed else nothing, receiver):
                if content.size:
                    state = unpacked(content)
                    states[state["rank"]] = state
    if holders.get(r := own["rank"] if own else -1) == rank:
        states[r] = own
    model = next(state for state in states if state is not None)
    shared = step <= rampup_begin_step
    for r in {0, *old_ranks_of(rank, old_size, size)}:
        if states[r] is None:
            states[r] = _without_residuals(model, r, shared)
    return states


def _warn_of_lost(lost: list[int], old_size: int, step: int, rank: int) -> None:
    if lost and rank == 0:
        warnings.warn(
            f"{len(lost)} of {old_size} ranks left (ranks {', '.join(map(str, lost))}), and with them what they "
            f"had not sent until step {step}",
            RuntimeWarning,
            stacklevel=2,
        )


def _without_residuals(state: State, rank: int, shared: bool) -> State:
    parameters = {}
    for name, entry in state["parameters"].items():
        own = own_arrays(entry, shared)
        parameters[name] = {k: np.zeros(np.shape(a), np.asarray(a).dtype) if k in own else a for k, a in entry.items()}
    return {**state, "rank": rank, "parameters": parameters}
