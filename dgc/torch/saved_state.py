"""Notice, for an optimizer's compressor, that a script saves, loads or broadcasts the optimizer's state.

An optimizer's state dict holds neither u nor v, which belong to one rank and one point of the training. If a script
loads the state dict without the compressor's own state, the training goes back to a point that u and v do not belong
to. Then the compressor drops u and v on every rank.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dgc.core.collectives import Transport
from dgc.torch.adoption import Adoption, is_empty_entry
from dgc.torch.horovod import broadcasting, is_running
from dgc.torch.tensors import is_sharded, samples
from dgc.torch.untraced import weakly

# A key of saved states. It marks a state that was saved after steps with a compressor. Such a state holds no momentum,
# and would look like a new one without the key. The key may remain in an optimizer that is later stepped without a
# compressor. Its value, the hash from moment_of(), shows this: the parameters no longer match it.
#
# The key is stored in param_groups, so that load_state_dict() keeps it in an optimizer that is not bound yet; bind()
# removes it. Under Horovod, and with sharded parameters, the key is stored next to the groups instead, because
# hvd.broadcast_optimizer_state broadcasts the groups key by key, and torch's distributed checkpoints read each key of
# the groups. In these two cases a state that is loaded before bind() looks like a new one.
_STEPPED = "stepped_with_compressor"

_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()

_ADVICE = (
    "save and load compression.state_dict(), too; docs/pytorch.md shows how, also with Accelerate, Hugging Face's "
    "Trainer, Lightning, Fabric and torch's distributed checkpoints (RankState)"
)


class Change(NamedTuple):
    """The changes of the optimizer's state since the last step.

    Attributes:
        restored: a state was loaded into the optimizer, and none into the compressor.
        broadcast: the state was broadcast.
        stepped: the loaded state was saved after steps with a compressor, and does not hold the compressor's state.
        distributed: torch's distributed checkpoints have initialised the state, to save or load it.
        kept: a state was loaded into the compressor. A state that is loaded into the optimizer belongs to it.
    """

    restored: bool = False
    broadcast: bool = False
    stepped: bool = False
    kept: bool = False
    distributed: bool = False


class SavedState:
    """Notices changes of one optimizer's state.

    Attributes:
        pending: the changes since the last step.
        mark: the key's value in the loaded state, or in the groups of the bound optimizer; "" if there is no key.
    """

    def __init__(self, adoption: Adoption, loaded: Callable[[], None]) -> None:
        self._adoption = adoption
        self._when_loaded = loaded
        self._warned = self._has_stepped = self._saved_in_step = False
        self.pending = Change()
        self.mark = ""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks on this optimizer's saving and loading; they do not keep this object alive.

        They replace those of an earlier compressor. They stay after its ``close()``, because its state may be saved.
        """
        for hook in _hooks.pop(optimizer, ()):
            hook.remove()
        _hooks[optimizer] = [
            optimizer.register_state_dict_pre_hook(weakly(self._before_saving)),
            optimizer.register_state_dict_post_hook(weakly(self._after_saving)),
            optimizer.register_load_state_dict_pre_hook(weakly(self._before_loading)),
            optimizer.register_load_state_dict_post_hook(weakly(self._after_loading)),
        ]

    def compressor_loaded(self) -> None:
        """Note that the compressor's state was loaded. Call it on all ranks.

        A state that the optimizer loads before the next step belongs to it.
        """
        self.pending, self._has_stepped = Change(kept=True), True

    def made_state(self) -> None:
        """Note that torch's distributed checkpoints have initialised the optimizer's state, to save or load it."""
        self.pending = self.pending._replace(distributed=True)

    def forget(self) -> None:
        """Forget all changes."""
        self.pending, self.mark = Change(), ""

    def change(self, transport: Transport, owner: torch.optim.Optimizer | None) -> Change:
        """Return and forget the changes since the last step. Collective after a broadcast."""
        change = self.pending._replace(stepped=bool(self.mark and owner) and is_of_moment(owner, self.mark))
        if change.kept:
            change = change._replace(restored=False, stepped=False)
        if change.broadcast:
            # Perhaps only the root has loaded the state that all ranks have now.
            told = np.empty((transport.size, 2), np.uint8)
            transport.allgather(np.array([change.restored, change.stepped], np.uint8), told)
            restored, stepped = told.max(axis=0).astype(bool).tolist()
            change = Change(restored, True, stepped)
        self.forget()
        self._has_stepped = True
        return change

    def warn_of_loss(self, steps: int, change: Change, momentum: bool, warms_up: bool) -> None:
        """Warn once about all that is lost because a state was loaded only into the optimizer."""
        lost = [f"what was not sent yet in the {steps} steps before is dropped"] if steps else []
        if change.stepped and not steps:
            lost.append("what the saved run had not sent yet is dropped")
        # Distributed checkpoints do not read a dense run's momentum.
        moved = steps or change.stepped or (change.restored and change.distributed)
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
        self._saved_in_step = self._adoption.hides  # the script may have a hook that saves during a step
        self._adoption.show()
        self._adoption.drop_empty(optimizer)
        if broadcasting():
            self.pending = self.pending._replace(broadcast=True)

    def _after_saving(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        if self._saved_in_step:
            self._adoption.hide(optimizer)
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
        """Return the state dict without empty entries and without our key."""
        self._adoption.show()
        if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
            return None  # torch raises an error about this argument
        groups = [dict(group) for group in saved.get("param_groups", ())]
        self.mark = take_mark([*groups, dict(saved)])
        state = {key: entry for key, entry in saved["state"].items() if not is_empty_entry(entry)}
        return {**saved, "state": state, "param_groups": groups}

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        self.pending = self.pending._replace(restored=True)
        self._when_loaded()


def take_mark(groups: Sequence[dict[str, Any]]) -> str:
    """Remove our key from groups; return its value, or "" if no group has it."""
    return max([str(group.pop(_STEPPED, "")) for group in groups], default="")


def moment_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of a few values of each parameter, which identifies a point of the training."""
    values = [samples(p).tobytes() for group in optimizer.param_groups for p in group["params"]]
    return hashlib.sha256(b"".join(values)).hexdigest()


def is_of_moment(optimizer: torch.optim.Optimizer, mark: str) -> bool:
    """Return whether there is a mark, and the parameters have not changed since it was made."""
    return bool(mark) and moment_of(optimizer) == mark
