"""Which parameters of a group are stepped as one: decided once, checked every step, decided anew when it fails."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.torch.fuse.fused_set import FlatBlock, FusedSet, state_signature
from dgc.torch.fuse.memory import adjacent_runs, are_parallel, flatten_weights, is_fusable_weight


class GroupPlan:
    """The fused sets of one parameter group.

    Attributes:
        sets: fused sets of at least two parameters.
        unfused: all other parameters in the order of the group, for the optimizer to treat as in a plain step.
    """

    def __init__(self, *, do_flatten: bool, check_flatten: bool) -> None:
        """Nothing is planned yet; the arguments are those of ``fuse_optimizer``."""
        self._do_flatten = do_flatten
        self._check_flatten = check_flatten
        self._params: list[Tensor] = []
        self._blocks: list[FlatBlock] = []
        self._flattened: dict[int, Tensor] = {}
        self._frozen: list[Tensor] = []
        self._without_grad: list[Tensor] = []
        self._single: list[tuple[Tensor, int]] = []
        self._stale = True
        self._differentiable = False
        self.sets: list[FusedSet] = []
        self.unfused: list[Tensor] = []

    def flatten(self, group: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Give parameters that are seen trainable for the first time their flat memory, once in their life.

        At fusing that is all of them; later those of an added group, or unfrozen ones.

        Args:
            group: the parameter group.
            optimizer: the one it belongs to.
        """
        params = group["params"]
        here = {id(p) for p in params}
        self._flattened = {key: p for key, p in self._flattened.items() if key in here}
        new = [p for p in params if p.requires_grad and id(p) not in self._flattened and is_fusable_weight(p)]
        if new and self._do_flatten and not group.get("differentiable"):
            flatten_weights(new, [p for other in optimizer.param_groups for p in other["params"]])
        self._flattened.update((id(p), p) for p in new)
        self._frozen = [p for p in params if not p.requires_grad]
        self._form_blocks(params)

    def prepare(self, group: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Make ``sets`` and ``unfused`` right for the gradients, state and memory as they are now."""
        state = optimizer.state
        if not self._blocks_valid(group["params"]):
            self.flatten(group, optimizer)
            self._stale = True
        differentiable = bool(group.get("differentiable"))
        if self._stale or differentiable != self._differentiable or not self._sets_valid(state):
            self._differentiable = differentiable
            self._form_sets(group, state)
            self._stale = False

    def _blocks_valid(self, params: list[Tensor]) -> bool:
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(block.is_in_place() for block in self._blocks)
            and not any(p.requires_grad for p in self._frozen)
        )

    def _sets_valid(self, state: Mapping[Tensor, dict]) -> bool:
        return (
            all(p.grad is None for p in self._without_grad)
            and all(p.grad is not None and len(state.get(p, ())) == known for p, known in self._single)
            and all(fused.prepare(state) for fused in self.sets)
        )

    def _form_blocks(self, params: list[Tensor]) -> None:
        """Find the runs of adjacent weights; a run that is as it was keeps its block and thereby its buffers."""
        known = {id(block.members[0]): block for block in self._blocks if block.is_in_place()}
        blocks: list[FlatBlock] = []
        for run in adjacent_runs(p for p in params if is_fusable_weight(p)):
            if len(run) > 1:
                block = known.get(id(run[0]))
                if block is None or len(run) != len(block.members) or not all(map(is_, run, block.members)):
                    block = FlatBlock(run)
                blocks.append(block)
        if self._check_flatten and self._do_flatten:
            self._warn_of_losses(params, blocks)
        self._params, self._blocks = list(params), blocks

    def _warn_of_losses(self, params: list[Tensor], blocks: list[FlatBlock]) -> None:
        here = {id(p) for p in params}
        before = {id(p) for block in self._blocks for p in block.members} & here
        lost = before - {id(p) for block in blocks for p in block.members}
        if lost:
            warnings.warn(
                f"{len(lost)} of {len(before)} flattened parameters are no longer where fuse_optimizer put them "
                "(after model.to(...), load_state_dict(assign=True) or another library's flattening, for example). "
                "They are updated one by one from now on: results stay right, but the speed is lost. "
                "Call fuse_optimizer last, on a new optimizer.",
                UserWarning,
                stacklevel=2,
            )

    def _form_sets(self, group: Mapping[str, Any], state: Mapping[Tensor, dict]) -> None:
        self.sets, self._without_grad = [], []
        single: list[Tensor] = []
        # A differentiable step must see the user's own tensors.
        blocks = [] if self._differentiable else self._blocks
        for block in blocks:
            start = 0
            signatures = [self._signature(p, state) for p in block.members]
            while start < len(block.members):
                stop = start + 1
                while stop < len(block.members) and self._joins(block, start, stop, signatures):
                    stop += 1
                if stop - start > 1:
                    self.sets.append(FusedSet(block, start, stop, state, move_grads=self._do_flatten))
                else:
                    (self._without_grad if block.members[start].grad is None else single).append(block.members[start])
                start = stop
        self._single = [(p, len(state.get(p, ()))) for p in single]
        fused = {id(p) for fused_set in self.sets for p in fused_set.members}
        self.unfused = [p for p in group["params"] if id(p) not in fused]

    def _signature(self, param: Tensor, state: Mapping[Tensor, dict]) -> frozenset | None:
        grad = param.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad or grad.dtype != param.dtype:
            return None
        return state_signature(param, state.get(param, {}))

    def _joins(self, block: FlatBlock, start: int, i: int, signatures: list[frozenset | None]) -> bool:
        """Whether member ``i`` can extend the set that begins at ``start``."""
        if signatures[i] is None or signatures[i] != signatures[start]:
            return False
        if self._do_flatten:
            return True
        weights = block.members[i - 1 : i + 1]
        return are_parallel([p.grad for p in weights], weights, block.offsets[i - 1 : i + 2])

    def write_back(self, state: Mapping[Tensor, dict]) -> None:
        """Write the fused state back to the parameters, after the step."""
        changed = [fused.write_back(state) for fused in self.sets]
        for fused in self.sets:
            fused.remember_versions()
        # Pieces that were kept apart by what their state lacked may be one from now on.
        self._stale = any(changed) and len(self.sets) + len(self._single) > 1
