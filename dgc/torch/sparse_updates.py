"""Update only the entries that were received, without dense results and without a pass over all parameters.

If the optimizer is a ``torch.optim.SGD``, and the compressor applies its momentum, Nesterov and decay, its step is
only ``p <- p - lr * result``. The result is 0 nearly everywhere, and ``p - lr * 0`` is ``p``. The entries that are not
0 are applied by the same function that SGD calls, so the parameters are the same, bit for bit.
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

from dgc.core.exchange.entries import EntrySum
from dgc.torch.adoption import updater_of, updating_class, users_class
from dgc.torch.front_end import follow_steps
from dgc.torch.tensors import is_sharded, local

# A function that returns why an optimizer needs dense results in a step; None if it does not need them.
Obstacle = Callable[[torch.optim.Optimizer | None], str | None]


class SparseUpdates:
    """Decides in each step whether the sums of entries are deferred, and applies them.

    The sums are applied if ``step()`` itself ends the exchange; ``.grad`` is None after that. A script that calls
    ``synchronize()`` gets dense results. From its second step on, they are written during the backward pass.

    Attributes:
        reason: why results are dense; None if updates are sparse, and "" before the first step.
        update_follows: whether the optimizer uses the latest results before the script can see them.
        applied: whether the sums were applied. False again when the next step begins.
        deferred: the sums of some buckets, for :meth:`apply`.
        obstacle: the function that says why an optimizer needs dense results. While it is None, all results are dense.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], enabled: bool, sparsified: int, dense: int) -> None:
        """Prepare for these parameters. ``sparsified`` and ``dense`` count the elements that are sent in each way."""
        self._parameters = parameters
        self._unwanted = None if enabled else "sparse_updates=False"
        if enabled and not sparsified:
            self._unwanted = "nothing is sparsified"
        elif enabled and not dense:
            self._unwanted = "all tensors are sparsified: no .grad would show whether the script clears it"
        self.update_follows = True
        self.applied = False
        self._apart: list[int] = []  # addresses of parameters that are known not to share memory
        self.deferred: Sequence[EntrySum] | None = None
        self.obstacle: Obstacle | None = None
        self.reason: str | None = ""

    def begin(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Begin a step. Return whether sums of entries are to be deferred in it."""
        self.applied, self.deferred = False, None
        self.reason = self._refusal(optimizer)
        return self.reason is None

    def will_apply(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether the deferred sums are applied after the exchange, instead of being written."""
        # An obstacle may have appeared since the step began. If there was one already, nothing was deferred.
        if not self.update_follows or self.reason is not None or self.obstacle is None or self.obstacle(optimizer):
            return False
        if any(_is_part(p.grad) for p in self._parameters):
            self.reason = "a gradient is a part of a larger tensor, in which the script may look for the results"
        return self.reason is None

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters by the deferred sums, if any, and set their ``.grad`` to None."""
        if self.deferred is None:
            return
        members, deferred, self.deferred = self._parameters, self.deferred, None
        groups: dict[int, dict[str, Any]] = {}
        for group in optimizer.param_groups if deferred else ():
            groups.update(dict.fromkeys(map(id, group["params"]), group))
        for total in deferred:
            for segment in total.bucket.sparse:
                members[segment.parameter].grad = None
            runs: dict[int, list[tuple[torch.Tensor, np.ndarray, np.ndarray]]] = {}
            for i, places, values in total.tensors():
                runs.setdefault(id(groups[id(members[i])]), []).append((members[i], places, values))
            for run in runs.values():
                _update_entries(run, groups[id(run[0][0])])
        self.applied = bool(deferred)

    def _refusal(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        if self._unwanted is not None:
            return self._unwanted
        if self.obstacle is None:
            return "whole gradients are returned to the script"
        shards = list(map(local, self._parameters))
        for p in shards:
            if not (p.is_cpu and p.dtype in (torch.float32, torch.float64) and p.is_contiguous()):
                return "a parameter is not a contiguous float32 or float64 tensor on the CPU"
        addresses = list(map(torch.Tensor.data_ptr, shards))
        if addresses != self._apart:  # check, because one call updates entries of several parameters
            spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in shards if p.numel())
            if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
                return "two parameters share memory"
            self._apart = addresses
        if (refused := self.obstacle(optimizer)) is not None:
            return refused
        return None if self.update_follows else "synchronize() is called before step()"


def _is_part(gradient: torch.Tensor | None) -> bool:
    if gradient is None or gradient.is_sparse or is_sharded(gradient):  # FSDP2's shards are parts of its own buffers
        return False
    return gradient.untyped_storage().nbytes() > gradient.nbytes


def obstacle_of_sgd(parameters: Sequence[torch.Tensor], applied: Collection[str], scaled: bool) -> Obstacle:
    """Return a function that says why the optimizer must update all parameters itself."""
    ids = {id(p) for p in parameters}
    of_torch: list[object] = []  # SGD's step, once a check has shown that it is torch's

    def obstacle(optimizer: torch.optim.Optimizer | None) -> str | None:
        if scaled:
            return "loss_scale is given"
        if optimizer is None or _class_of(optimizer) is not torch.optim.SGD:
            return f"the optimizer is {type(optimizer).__name__}, not torch.optim.SGD"
        everywhere = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
        hooked = max(everywhere) > follow_steps.cache_info().currsize
        for stepping in (optimizer, updater_of(optimizer)):
            hooked |= bool(stepping._optimizer_step_pre_hooks or stepping._optimizer_step_post_hooks)
        if hooked:
            return "a hook before or after step() may look at them"
        step = vars(torch.optim.SGD)["step"]
        if not getattr(step, "hooked", False):
            return "torch calls no hooks before SGD's step"
        if step not in of_torch:
            if not _is_of_torch(step):
                return "somebody has replaced SGD's step"
            of_torch[:] = [step]
        missing = set(ids)
        for group in optimizer.param_groups:
            members = set(map(id, group["params"]))
            if members.isdisjoint(ids):
                continue
            missing -= members
            for option in ("momentum", "weight_decay"):
                if group.get(option) and option not in applied:
                    return f"the optimizer applies {option} itself"
            for option in ("maximize", "differentiable"):
                if group.get(option):
                    return f"the optimizer has {option}=True"
            if not (isinstance(group["lr"], (int, float)) and 0 < group["lr"] < math.inf):
                return "the learning rate is not a positive number"
        return "a parameter is in no group of the optimizer" if missing else None

    return obstacle


def _is_of_torch(function: object) -> bool:
    """Return whether a function, and every function that it wraps, was defined in torch."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _class_of(optimizer: torch.optim.Optimizer) -> type:
    """Return the user's class, or the class that it declares to update with. A subclass may do more than that."""
    own = users_class(optimizer)
    return updating_class(optimizer) if "local_optimizer" in vars(own) else own


def _update_entries(run: Sequence[tuple[torch.Tensor, np.ndarray, np.ndarray]], group: dict[str, Any]) -> None:
    """Update parameters of one group. ``run`` holds (parameter, places, values) for each parameter."""
    flats, parts, results = [], [], []
    for p, places, values in run:
        flat = local(p).detach().view(-1).numpy()
        flats.append(flat)
        parts.append(flat[places])
        results.append(values)
    entries = np.concatenate(parts)
    sgd(
        [torch.from_numpy(entries)],
        [torch.from_numpy(np.concatenate(results))],
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
