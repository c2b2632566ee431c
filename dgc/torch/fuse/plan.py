"""Which parameters of a group are stepped as one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dgc.torch.fuse.fused_set import FlatBlock, FusedSet
from dgc.torch.fuse.memory import adjacent_runs, flatten_weights, is_fusable_weight


class GroupPlan:
    """The blocks of flat memory of one parameter group, found anew when a parameter has moved.

    Attributes:
        sets: fused sets of at least two parameters, of this step.
        unfused: all other parameters in the order of the group, for the optimizer to treat as in a plain step.
    """

    def __init__(self, *, do_flatten: bool, check_flatten: bool) -> None:
        """Plan nothing yet; the arguments are those of ``fuse_optimizer``."""
        self._do_flatten = do_flatten
        self._check_flatten = check_flatten
        self._params: list[Tensor] = []
        self._blocks: list[FlatBlock] = []
        self._flattened: dict[int, Tensor] = {}
        self._frozen: list[Tensor] = []
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
        if not self._blocks_valid(group["params"]):
            self.flatten(group, optimizer)
        # A differentiable step must see the user's own tensors.
        blocks = [] if group.get("differentiable") else self._blocks
        self.sets = [found for b in blocks for found in b.sets(optimizer.state, move_grads=self._do_flatten)]
        fused = {id(p) for found in self.sets for p in found.members}
        self.unfused = [p for p in group["params"] if id(p) not in fused]

    def _blocks_valid(self, params: list[Tensor]) -> bool:
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(block.is_in_place() for block in self._blocks)
            and not any(p.requires_grad for p in self._frozen)
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
