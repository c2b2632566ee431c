"""What becomes of the compressor when the optimizer's state is saved, loaded or broadcast.

A state dict of the optimizer holds neither u nor v, which belong to one rank and one moment. Whoever loads one without
the compressor's own state goes back to another moment: what the compressor remembers of the run that is left is
dropped, on every rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dgc.core.collectives import Transport
from dgc.torch.adoption import Adoption, is_empty
from dgc.torch.horovod import broadcasting, is_running
from dgc.torch.tensors import is_sharded, samples
from dgc.torch.untraced import weakly

_STEPPED = "stepped_with_compressor"
"""A key of saved states: a state without momentum may be a new one, or one after steps with a compressor.

Its value is :func:`moment_of` the state: an optimizer that has gone on without a compressor since may keep the key.

In ``param_groups`` it survives ``load_state_dict`` of an optimizer that is not bound yet, where binding finds it. The
groups of a bound optimizer never hold it. In jobs over Horovod, and of sharded parameters, it stands beside them: what
rank 0 alone has loaded, ``hvd.broadcast_optimizer_state`` broadcasts key by key, and torch's distributed checkpoints
ask a checkpoint for every key that the groups have. Nothing of an optimizer's state that torch keeps remains for these:
a state that they load before binding looks like a new one.
"""

_ADVICE = (
    "dgc.torch.save_checkpoint() and load_checkpoint() keep both, and so does what docs/checkpoints.md shows for "
    "Accelerate, Hugging Face's Trainer, Lightning and Fabric, and RankState in torch's distributed checkpoints"
)


class Change(NamedTuple):
    """What happened to the optimizer's state since the last step.

    Attributes:
        restored: a state was loaded into it, and none into the compressor.
        broadcast: it was broadcast.
        stepped: the state that was loaded, perhaps before binding, is one after steps with a compressor, which had its
            momentum and residuals.
        distributed: torch's distributed checkpoints have asked for the state.
        kept: a state was loaded into the compressor; what is loaded into the optimizer with it belongs to it.
    """

    restored: bool = False
    broadcast: bool = False
    stepped: bool = False
    kept: bool = False
    distributed: bool = False


class SavedState:
    """Follows what is saved from, loaded into and broadcast to the state of one optimizer.

    Attributes:
        pending: what was loaded or broadcast since the last step.
        mark: of what was loaded, or of the groups of an optimizer when it was bound to a compressor without a state.
    """

    def __init__(self, adoption: Adoption, loaded: Callable[[], None]) -> None:
        """Begin with nothing loaded."""
        self._adoption = adoption
        self._when_loaded = loaded
        self._warned = self._has_stepped = False
        self.pending = Change()
        self.mark = ""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks on this optimizer's saving and loading; they do not keep this object alive."""
        optimizer.register_state_dict_pre_hook(weakly(self._before_saving))
        optimizer.register_state_dict_post_hook(weakly(self._after_saving))
        optimizer.register_load_state_dict_pre_hook(weakly(self._before_loading))
        optimizer.register_load_state_dict_post_hook(weakly(self._after_loading))

    def compressor_loaded(self) -> None:
        """A state was loaded into the compressor; what is loaded into the optimizer before the next step belongs to it.

        Call it on all ranks, as :meth:`forget`.
        """
        self.pending, self._has_stepped = Change(kept=True), True

    def made_state(self) -> None:
        """Torch's distributed checkpoints let the optimizer make its state, which they then save or load."""
        self.pending = self.pending._replace(distributed=True)

    def take_over(self, other: SavedState) -> None:
        """Go on from what another one of the same engine knows."""
        self.pending, self._has_stepped, self.mark = other.pending, other._has_stepped, other.mark

    def forget(self) -> None:
        """Nothing was loaded or broadcast."""
        self.pending, self.mark = Change(), ""

    def change(self, transport: Transport, owner: torch.optim.Optimizer | None) -> Change:
        """What happened since the last step, which the owner makes; collective after a broadcast."""
        change = self.pending._replace(stepped=bool(self.mark and owner) and is_of_moment(owner, self.mark))
        if change.kept:
            change = change._replace(restored=False, stepped=False)
        if change.broadcast:
            # The root alone may have loaded what all ranks have now.
            told = np.empty((transport.size, 2), np.uint8)
            transport.allgather(np.array([change.restored, change.stepped], np.uint8), told)
            restored, stepped = told.max(axis=0).astype(bool).tolist()
            change = Change(restored, True, stepped)
        self.forget()
        self._has_stepped = True
        return change

    def warn_of_loss(self, steps: int, change: Change, momentum: bool, warms_up: bool) -> None:
        """Warn once of what a state that was loaded into the optimizer alone does not restore."""
        lost = [f"what was not sent yet in the {steps} steps before is dropped"] if steps else []
        if change.stepped and not steps:
            lost.append("what the saved run had not sent yet is dropped")
        moved = steps or change.stepped or (change.restored and change.distributed)  # by it, dense momentum is not read
        lost += ["momentum begins at 0"] if moved and not momentum else []
        lost += ["the warm-up begins again at step 0"] if warms_up and lost and not steps else []
        if self._warned or not lost:
            return
        self._warned = True
        warnings.warn(
            f"a state was loaded into the optimizer, but none into the compressor, which holds residuals and momentum: "
            f"{', and '.join(lost)}; {_ADVICE}",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _before_saving(self, optimizer: torch.optim.Optimizer) -> None:
        self._adoption.show()
        self._adoption.drop_empty(optimizer)
        if broadcasting():
            self.pending = self.pending._replace(broadcast=True)

    def _after_saving(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        if broadcasting():
            return
        moments = self._adoption.moments(optimizer)
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True) if moments else ():
            for p, key in zip(group["params"], packed["params"], strict=True):
                if p in moments:
                    saved["state"][key] = {**saved["state"][key], "exp_avg": moments[p]}
        mark = moment_of(optimizer) if self._has_stepped else self.mark
        if not mark:
            return
        sharded = any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
        beside = sharded or self.pending.distributed or is_running()
        for entry in [saved] if beside else saved["param_groups"]:
            entry[_STEPPED] = mark

    def _before_loading(self, optimizer: torch.optim.Optimizer, saved: object) -> Any:
        """The state dict without empty entries, and without our key."""
        self._adoption.show()
        if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
            return None  # torch will say what is wrong with it
        groups = [dict(group) for group in saved.get("param_groups", ())]
        self.mark = take_mark([*groups, dict(saved)])
        state = {key: entry for key, entry in saved["state"].items() if not is_empty(entry)}
        return {**saved, "state": state, "param_groups": groups}

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        self.pending = self.pending._replace(restored=True)
        self._when_loaded()


def take_mark(groups: Sequence[dict[str, Any]]) -> str:
    """The mark of a run with a compressor that the groups of a state have, or ""; they have none afterwards."""
    return max([str(group.pop(_STEPPED, "")) for group in groups], default="")


def moment_of(optimizer: torch.optim.Optimizer) -> str:
    """A hash of values of all parameters, which tells one moment of a training from the others."""
    values = [samples(p).tobytes() for group in optimizer.param_groups for p in group["params"]]
    return hashlib.sha256(b"".join(values)).hexdigest()


def is_of_moment(optimizer: torch.optim.Optimizer, mark: str) -> bool:
    """Whether there is a mark, and it is of the parameters as they are now."""
    return bool(mark) and moment_of(optimizer) == mark
