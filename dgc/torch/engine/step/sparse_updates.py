"""Updates of the entries that came alone, without a dense result and without the optimizer's pass over the parameters.

Where the optimizer is a ``torch.optim.SGD`` whose momentum, Nesterov and decay the compressor applies, all that is
left of its step is ``p <- p - lr * result``. The result is 0 nearly everywhere, and ``p - lr * 0`` is ``p``. The
entries that are not 0 go through the very function that SGD calls: the parameters are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.sgd import sgd

from dgc.core.exchange.records import EntrySum

_NOT_AT_0 = "momentum", "weight_decay"


class SparseUpdates:
    """Decides in each step whether the sums of entries are held, and applies them.

    They are held while nobody has asked for gradients: a script that calls ``synchronize()`` itself gets dense results,
    written while the backward pass goes on, from the next step on.

    Attributes:
        reason: why results are dense; None where updates are sparse.
        is_driven: whether somebody calls :meth:`apply` after the exchange of a step.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], applied: Iterable[str], enabled: bool, scaled: bool) -> None:
        """Take what stays the same.

        Args:
            parameters: that are compressed.
            applied: options of the optimizer that the compressor applies in its place.
            enabled: whether the user wants sparse updates.
            scaled: whether results are multiplied by a loss scale, which a GradScaler takes out again.
        """
        self._parameters = parameters
        self._ids = {id(p) for p in parameters}
        self._applied = set(applied)
        self._enabled = enabled
        self._scaled = scaled
        self._steps_at_once = True  # whether step() exchanges, as far as is known
        self._stepping = False
        self.is_driven = False
        self.reason: str | None = "no step was taken yet"

    def begin(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """A step begins; returns whether sums of entries are to be held in it."""
        self.reason = self._obstacle(optimizer)
        if self.reason is None and not self._steps_at_once:
            self.reason = "synchronize() is called before step()"
        return self.reason is None

    def stepping(self, at_once: bool) -> None:
        """The optimizer's ``step()`` begins.

        Args:
            at_once: whether it exchanges what is left of the gradients, and nobody sees them before the update.
        """
        self._stepping = at_once

    def concluded(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """The exchange of a step is over; returns whether held sums will be applied instead of being written."""
        self._steps_at_once = self._stepping
        return self._stepping and self._obstacle(optimizer) is None

    def stepped(self) -> None:
        """The optimizer's ``step()`` is over, or has raised."""
        self._stepping = False

    def apply(
        self, optimizer: torch.optim.Optimizer, held: Sequence[EntrySum], members: Sequence[torch.Tensor]
    ) -> None:
        """Update the parameters by sums that were held, and let their ``.grad`` be None.

        Args:
            optimizer: whose groups hold the parameters.
            held: of some buckets.
            members: the parameters in the order of the layout.
        """
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for total in held:
            for segment in total.bucket.sparse:
                members[segment.parameter].grad = None
            _update(total, lambda i: members[i], lambda p: groups[id(p)])

    def _obstacle(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        """Why the dense result is needed; None if it is not."""
        if not self._enabled:
            return "sparse_updates=False"
        if not self.is_driven or optimizer is None:
            return "Horovod's own wrapper applies them"
        if self._scaled:
            return "loss_scale is given"
        if type(optimizer).__mro__[1] is not torch.optim.SGD:
            return f"the optimizer is {type(optimizer).__name__}, not torch.optim.SGD"
        if optimizer._optimizer_step_pre_hooks or len(torch_optimizer._global_optimizer_pre_hooks) > 1:
            return "a hook before step() may look at them"
        for group in optimizer.param_groups:
            if any(id(p) in self._ids for p in group["params"]):
                refused = self._refusal_of(group)
                if refused is not None:
                    return refused
        if not all(is_plain(p) for p in self._parameters):
            return "a parameter is not a contiguous float32 or float64 tensor on the CPU"
        return None

    def _refusal_of(self, group: dict[str, Any]) -> str | None:
        for option in _NOT_AT_0:
            if group.get(option) and option not in self._applied:
                return f"the optimizer applies {option} itself"
        for option in ("maximize", "differentiable"):
            if group.get(option):
                return f"the optimizer has {option}=True"
        rate = group["lr"]
        if not isinstance(rate, (int, float)) or not rate > 0:
            return "the learning rate is not a number > 0"
        return None


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether entries of a parameter can be changed where they are."""
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.is_contiguous()
    )


def _update(
    total: EntrySum,
    parameter_of: Callable[[int], torch.Tensor],
    group_of: Callable[[torch.Tensor], dict[str, Any]],
) -> None:
    """One call of SGD's function for neighbours of the same group."""
    run: list[tuple[torch.Tensor, np.ndarray, np.ndarray]] = []
    group: dict[str, Any] | None = None
    for i, places, values in total.tensors():
        p = parameter_of(i)
        if group is not None and group_of(p) is not group:
            _update_run(run, group)
            run = []
        group = group_of(p)
        run.append((p, places, values))
    if group is not None:
        _update_run(run, group)


def _update_run(run: Sequence[tuple[torch.Tensor, np.ndarray, np.ndarray]], group: dict[str, Any]) -> None:
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
