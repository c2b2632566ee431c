"""Elastic Horovod: a state that takes the compressor along, and the decorator that goes with it.

state = dgc.torch.elastic.TorchState(model=model, optimizer=torch.optim.SGD(...), compression=dgc.Compression.dgc(...))

A new rank may meet the others only where all of them are: in the decorated function. So the optimizer is wrapped there,
by each group of ranks anew, and is a plain one in between.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from dgc.core.state import own_arrays
from dgc.errors import TransportError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.horovod import HOROVOD
from dgc.torch.optimizer import DistributedOptimizer

State = dict[str, Any]

_WRAPPING = (
    *("compression", "synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad"),
    "__reduce_ex__",
)
"""What ``dgc.torch.DistributedOptimizer`` sets on an optimizer."""


class TorchState(hvd.elastic.TorchState):
    """``hvd.elastic.TorchState`` of a model, its plain optimizer, a compressor and the script's own values.

    What a rank had not sent leaves with it; a warning on rank 0 counts the ranks. Other residuals are redistributed as
    with ``load_state_dict(states, resize=True)``, for which each rank holds those of all for a moment.

    Attributes:
        compression: the compressor, within the decorated function.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        compression: DGCCompressor,
        wrapping: dict[str, Any] | None = None,
        **values: object,
    ) -> None:
        """Take what is committed and restored together. Local: no communication.

        Args:
            model: all of whose parameters have names in the compressor.
            optimizer: not wrapped.
            compression: bound to nothing.
            wrapping: further arguments of ``dgc.torch.DistributedOptimizer``.
            values: of the script, such as ``epoch=0``.
        """
        self._unbound, self._wrapping = compression, wrapping or {}
        self._committed: State | None = None
        super().__init__(model=model, optimizer=optimizer, **values)
        self.compression: DGCCompressor | None = None

    def begin(self) -> None:
        """Wrap the optimizer and load what was committed. Collective."""
        self.compression = copy.copy(self._unbound)
        HOROVOD.elastic = True
        try:
            named = self.model.named_parameters()
            DistributedOptimizer(self.optimizer, named, compression=self.compression, **self._wrapping)
        finally:
            HOROVOD.elastic = False
        states = hvd.allgather_object(self._committed, name="dgc.elastic")
        if states[0] is not None:  # whose model all ranks have
            self.compression.load_state_dict(_of_all_old_ranks(states, self.compression), resize=True)

    def end(self) -> None:
        """Leave a plain optimizer behind. Local: no communication."""
        if self.compression is not None:
            self.compression.close()
            self.compression = None
            for name in _WRAPPING:  # backward_passes_per_step stays: hooks that a traceback keeps alive read it
                self.optimizer.__dict__.pop(name, None)

    def sync(self) -> None:
        """Broadcast all but the compressor's state; :meth:`begin` follows."""
        # Horovod sends no options of an optimizer without state, and others in float32. It steps an optimizer that has
        # no state, to make one: decay would move the parameters.
        groups = self.optimizer.param_groups
        own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        options = hvd.broadcast_object(own, name="dgc.elastic.options")
        for group in groups:
            group["weight_decay"] = 0.0
        super().sync()
        for group, came in zip(groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(came, params=params)

    def save(self) -> None:  # noqa: D102
        super().save()
        if self.compression is not None:  # one process has no residuals: what was committed before is of another moment
            self._committed = None if self.compression.engine is None else self.compression.state_dict()


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """``hvd.elastic.run`` for a function whose first argument is a :class:`TorchState`."""

    @functools.wraps(function)
    def bound(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        try:
            state.begin()
            return function(state, *args, **kwargs)
        except TransportError as error:
            raise HorovodInternalError(str(error)) from error  # a rank is gone
        finally:
            state.end()

    return hvd.elastic.run(bound)


def _of_all_old_ranks(states: list[State | None], compression: DGCCompressor) -> list[State]:
    """The committed states by old rank, with zeros for ranks that left or had committed another step than rank 0."""
    first = states[0]
    assert first is not None, "rank 0 has committed"
    old = {s["rank"]: s for s in states if s is not None and s["step"] == first["step"] and s["size"] == first["size"]}
    lost = sorted(set(range(first["size"])) - set(old))
    if lost and hvd.rank() == 0:
        warnings.warn(
            f"{len(lost)} of {first['size']} ranks left (ranks {', '.join(map(str, lost))}), and with them what they "
            f"had not sent until step {first['step']}",
            RuntimeWarning,
            stacklevel=2,
        )
    replicated = first["step"] <= compression.config.rampup_begin_step
    return [old.get(r) or _without_residuals(first, r, replicated) for r in range(first["size"])]


def _without_residuals(state: State, rank: int, replicated: bool) -> State:
    parameters = {}
    for name, entry in state["parameters"].items():
        own = own_arrays(entry, replicated)
        parameters[name] = {k: np.zeros_like(a) if k in own else a for k, a in entry.items()}
    return {**state, "rank": rank, "parameters": parameters}
