"""Which parameters of a group are stepped as one: decided once, checked every step, decided anew when it fails."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.torch.fuse.fused_set import FusedSet, state_signature
from dgc.torch.fuse.memory import adjacent_runs, are_parallel, flatten_weights, is_fusable_weight, places


class GroupPlan:
    """The fused sets of one parameter group.

    Attributes:
        sets: fused sets of at least two parameters.
        unfused: all other parameters in the order of the group, for the optimizer to treat as in a plain step.
    """

    def __init__(self, *, do_flatten: bool, check_flatten: bool) -> None:
        """Plan nothing yet; the arguments are those of ``fuse_optimizer``."""
        self._do_flatten = do_flatten
        self._check_flatten = check_flatten and do_flatten
        self._params: list[Tensor] = []
        self._fusable: list[Tensor] = []
        self._layout: tuple = ()
        self._runs: list[list[Tensor]] = []
        self._flattened: dict[int, Tensor] = {}
        self._apart: list[tuple[Tensor, tuple[bool, int]]] = []
        self._differentiable = False
        self._stale = True
        self.sets: list[FusedSet] = []
        self.unfused: list[Tensor] = []

    def flatten(self, group: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Give parameters that are seen trainable for the first time their flat memory, once in their life.

        At fusing that is all of them; later those of an added group, or unfrozen ones. Then find the runs of adjacent
        weights.
        """
        params = group["params"]
        here = {id(p) for p in params}
        self._flattened = {key: p for key, p in self._flattened.items() if key in here}
        new = [p for p in params if p.requires_grad and id(p) not in self._flattened and is_fusable_weight(p)]
        if new and self._do_flatten and not group.get("differentiable"):
            flatten_weights(new, [p for other in optimizer.param_groups for p in other["params"]])
        self._flattened.update((id(p), p) for p in new)
        before = {id(p) for run in self._runs for p in run} & here
        self._params, self._fusable = list(params), [p for p in params if is_fusable_weight(p)]
        self._layout = _layout(self._params, self._fusable)
        self._runs = [run for run in adjacent_runs(self._fusable) if len(run) > 1]
        self._stale = True
        lost = before - {id(p) for run in self._runs for p in run}
        if lost and self._check_flatten:
            warnings.warn(
                f"{len(lost)} of {len(before)} flattened parameters are no longer where fuse_optimizer put them "
                "(after model.to(...), load_state_dict(assign=True) or another library's flattening, for example). "
                "They are updated one by one from now on: results stay right, but the speed is lost. "
                "Call fuse_optimizer last, on a new optimizer.",
                UserWarning,
                stacklevel=2,
            )

    def prepare(self, group: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Make ``sets`` and ``unfused`` right for the gradients, state and memory as they are now."""
        params, state = group["params"], optimizer.state
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if not same or _layout(params, self._fusable) != self._layout:
            self.flatten(group, optimizer)
        differentiable = bool(group.get("differentiable"))
        if (
            self._stale
            or differentiable != self._differentiable
            or any(_kind(p, state) != kind for p, kind in self._apart)
            or not all(fused.prepare(state) for fused in self.sets)
        ):
            self._differentiable, self._stale = differentiable, False
            # A differentiable step must see the user's own tensors.
            self._form_sets([] if differentiable else self._runs, state)

    def _form_sets(self, runs: list[list[Tensor]], state: Mapping[Tensor, dict]) -> None:
        self.sets, self._apart = [], []
        for run in runs:
            pieces: list[list[Tensor]] = []
            last = None
            for p in run:
                signature = self._signature(p, state)
                if pieces and signature is not None and signature == last and self._follows(p, pieces[-1][-1]):
                    pieces[-1].append(p)
                else:
                    pieces.append([p])
                last = signature
            self.sets += [FusedSet(piece, state) for piece in pieces if len(piece) > 1]
            self._apart += [(piece[0], _kind(piece[0], state)) for piece in pieces if len(piece) == 1]
        fused = {id(p) for fused_set in self.sets for p in fused_set.members}
        self.unfused = [p for p in self._params if id(p) not in fused]

    def _signature(self, param: Tensor, state: Mapping[Tensor, dict]) -> frozenset | None:
        grad = param.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad or grad.dtype != param.dtype:
            return None
        return state_signature(param, state.get(param, {}))

    def _follows(self, p: Tensor, last: Tensor) -> bool:
        """Whether the gradients of two neighbours are side by side, or may be moved there."""
        offsets = [0, last.numel(), last.numel() + p.numel()]
        return self._do_flatten or are_parallel([last.grad, p.grad], [last, p], offsets)  # type: ignore[list-item]

    def write_back(self, state: Mapping[Tensor, dict]) -> None:
        """Write the fused state back to the parameters, after the step."""
        for fused in self.sets:
            self._stale |= fused.write_back(state)


def _layout(params: list[Tensor], fusable: list[Tensor]) -> tuple:
    """What the flat memory and the runs depend on."""
    return [p.requires_grad for p in params], places(fusable), [p.shape for p in fusable]


def _kind(param: Tensor, state: Mapping[Tensor, dict]) -> tuple[bool, int]:
    """What changes of a parameter that is stepped alone before it can join its neighbours."""
    return param.grad is None, len(state.get(param, ()))
