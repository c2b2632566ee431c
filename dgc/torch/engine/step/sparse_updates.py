"""Updates of the entries that came alone, without a dense result and without the optimizer's pass over the parameters.

Where the optimizer is a ``torch.optim.SGD`` whose momentum, Nesterov and decay the compressor applies, all that is
left of its step is ``p <- p - lr * result``. The result is 0 nearly everywhere, and ``p - lr * 0`` is ``p``. The
entries that are not 0 go through the very function that SGD calls: the parameters are the same bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.sgd import sgd

from dgc.core.exchange.records import EntrySum
from dgc.torch.engine.step.callers import frames, stepping

Obstacle = Callable[[torch.optim.Optimizer | None], str | None]
"""Asked in every step why it needs dense results; None if it does not."""


class SparseUpdates:
    """Decides in each step whether the sums of entries are held, and applies them.

    They are held while nobody has asked for gradients: a script that calls ``synchronize()`` itself gets dense results,
    written while the backward pass goes on, from the next step on.

    Attributes:
        reason: why results are dense; None where updates are sparse.
        pending: whether sums of the latest step wait for :meth:`apply`.
        obstacle: set by whoever calls :meth:`apply` after the exchange of a step.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], enabled: bool) -> None:
        """Take what stays the same.

        Args:
            parameters: that are compressed.
            enabled: whether the user wants sparse updates.
        """
        self._parameters = parameters
        self._enabled = enabled
        self._steps_at_once = True  # whether step() exchanges, as far as is known
        self.pending = False
        self.obstacle: Obstacle | None = None
        self.reason: str | None = "no step was taken yet"

    def begin(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """A step begins; returns whether sums of entries are to be held in it."""
        self.pending = False
        self.reason = self._refusal(optimizer)
        if self.reason is None and not self._steps_at_once:
            self.reason = "synchronize() is called before step()"
        return self.reason is None

    def concluded(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """The exchange of a step is over; returns whether held sums will be applied instead of being written.

        Args:
            optimizer: whose ``step()`` exchanges what is left of the gradients, so that nobody sees them before the
                update; None if that is known.
        """
        self._steps_at_once = optimizer is None or _is_in_step(optimizer)
        self.pending = self._steps_at_once and self._refusal(optimizer) is None
        return self.pending

    def apply(
        self, optimizer: torch.optim.Optimizer, held: Sequence[EntrySum], members: Sequence[torch.Tensor]
    ) -> None:
        """Update the parameters by sums that were held, and let their ``.grad`` be None.

        Args:
            optimizer: whose groups hold the parameters.
            held: of some buckets.
            members: the parameters in the order of the layout.
        """
        self.pending = False
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]} if held else {}
        for total in held:
            for segment in total.bucket.sparse:
                members[segment.parameter].grad = None
            tensors = ((members[i], places, values) for i, places, values in total.tensors())
            for _, run in itertools.groupby(tensors, lambda each: id(groups[id(each[0])])):
                pieces = list(run)
                _update(pieces, groups[id(pieces[0][0])])

    def _refusal(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        if not self._enabled:
            return "sparse_updates=False"
        if self.obstacle is None:
            return "nobody can apply anything else"
        if not all(is_plain(p) for p in self._parameters):
            return "a parameter is not a contiguous float32 or float64 tensor on the CPU"
        return self.obstacle(optimizer)


def obstacle_of_sgd(parameters: Sequence[torch.Tensor], applied: Collection[str], scaled: bool) -> Obstacle:
    """Why a wrapped optimizer's own pass over the parameters is needed.

    Args:
        parameters: that are compressed.
        applied: options of the optimizer that the compressor applies in its place.
        scaled: whether results are multiplied by a loss scale, which a GradScaler takes out again.
    """
    ids = {id(p) for p in parameters}

    def obstacle(optimizer: torch.optim.Optimizer | None) -> str | None:
        if scaled:
            return "loss_scale is given"
        if optimizer is None or _class_of(optimizer) is not torch.optim.SGD:
            return f"the optimizer is {type(optimizer).__name__}, not torch.optim.SGD"
        stepping = [optimizer, getattr(optimizer, "optim", optimizer)]
        if any(o._optimizer_step_pre_hooks for o in stepping) or len(torch_optimizer._global_optimizer_pre_hooks) > 1:
            return "a hook before step() may look at them"
        if not getattr(vars(torch.optim.SGD)["step"], "hooked", False):
            return "torch calls no hooks before SGD's step"
        ours = (group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"]))
        return next(filter(None, (_refusal_of_group(group, applied) for group in ours)), None)

    return obstacle


def _is_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's ``step`` is among the callers, without a closure that would look at gradients."""
    calls = [frame for frame in frames() if stepping(frame) is optimizer]
    return bool(calls) and all(frame.f_locals.get("closure") is None for frame in calls)


def _class_of(optimizer: torch.optim.Optimizer) -> type:
    """Whose update a wrapped optimizer makes: its own class's, or that of the one which it shards."""
    given = type(optimizer).__mro__[1]
    return optimizer.optimizer_class if given.__dict__.get("_shards_updates") else given  # type: ignore[attr-defined]


def _refusal_of_group(group: dict[str, Any], applied: Collection[str]) -> str | None:
    for option in ("momentum", "weight_decay"):
        if group.get(option) and option not in applied:
            return f"the optimizer applies {option} itself"
    for option in ("maximize", "differentiable"):
        if group.get(option):
            return f"the optimizer has {option}=True"
    return refusal_of_rate(group["lr"])


def refusal_of_rate(rate: Any) -> str | None:
    """Why entries cannot be updated with a learning rate; None if they can."""
    positive = isinstance(rate, (int, float)) and 0 < rate < math.inf
    return None if positive else "the learning rate is not a positive number"


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether entries of a parameter can be changed where they are."""
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.is_contiguous()
    )


def _update(run: Sequence[tuple[torch.Tensor, np.ndarray, np.ndarray]], group: dict[str, Any]) -> None:
    """Update (parameter, places, values) of one group."""
    flats = [p.detach().view(-1).numpy() for p, _, _ in run]
    entries = np.concatenate([flat[places] for flat, (_, places, _) in zip(flats, run, strict=True)])
    sgd(
        [torch.from_numpy(entries)],
        [torch.from_numpy(np.concatenate([values for _, _, values in run]))],
        [None],
        foreach=group.get("foreach"),
        fused=group.get("fused"),
        weight_decay=0.0,
        momentum=0.0,
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    first = 0
    for flat, (p, places, _) in zip(flats, run, strict=True):
        flat[places] = entries[first : first + places.size]
        first += places.size
        torch.autograd.graph.increment_version(p)
