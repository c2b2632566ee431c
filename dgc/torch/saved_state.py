"""Follow, for an optimizer's compressor, how a script saves, loads or broadcasts the optimizer's state.

The momentum that the compressor applies is put into each saved state, where a dense run has it. When a state is loaded,
the momentum in it becomes u on every rank, and v is dropped, because it belongs to the training before the load. If the
compressor's own state was loaded, too, u and v are those of that state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dgc.core.collectives import Transport
from dgc.core.state import State
from dgc.torch.adoption import Adoption, is_empty_entry
from dgc.torch.horovod import broadcasting
from dgc.torch.untraced import weakly

# A key of saved states, beside torch's "state" and "param_groups", if the rank that saved had residuals. Optimizers
# ignore this key.
_UNSENT = "unsent_residuals"


class Change(NamedTuple):
    """The changes of the optimizer's state since the last step.

    Attributes:
        restored: a state was loaded into the optimizer, and none into the compressor.
        unsent: the rank that has saved it had residuals then.
        broadcast: the state was broadcast.
        kept: a state was loaded into the compressor. A state that is loaded into the optimizer belongs to it.
    """

    restored: bool = False
    unsent: bool = False
    broadcast: bool = False
    kept: bool = False


class SavedState:
    """Notices changes of one optimizer's state.

    Attributes:
        pending: the changes since the last step.
    """

    def __init__(self, adoption: Adoption, state: State, loaded: Callable[[], None]) -> None:
        self._adoption = adoption
        self._state = state
        self._when_loaded = loaded
        self._saved_in_step = self._loads_unsent = False
        self._hooks: list[Any] = []
        self.pending = Change()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks on this optimizer's saving and loading; they do not keep this object alive."""
        self._unhook()
        self._hooks = [
            optimizer.register_state_dict_pre_hook(weakly(self._before_saving)),
            optimizer.register_state_dict_post_hook(weakly(self._after_saving)),
            optimizer.register_load_state_dict_pre_hook(weakly(self._before_loading)),
            optimizer.register_load_state_dict_post_hook(weakly(self._after_loading)),
        ]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the optimizer alone. It gets the momentum back if that is equal on all ranks."""
        if self._state.is_equal:
            for p, entry in self._momentum(optimizer).items():
                optimizer.state[p].update(entry)
        self._unhook()

    def compressor_loaded(self) -> None:
        """Note that the compressor's state was loaded. Call it on all ranks.

        A state that the optimizer loads before the next step belongs to it.
        """
        self.pending = Change(kept=True)

    def forget(self) -> None:
        """Forget all changes."""
        self.pending = Change()

    def change(self, transport: Transport) -> Change:
        """Return and forget the changes since the last step. Collective after a broadcast."""
        change = self.pending
        if change.kept:
            change = change._replace(restored=False, unsent=False)
        if change.broadcast:
            # Perhaps only the root has loaded the state that all ranks have now.
            told = np.empty((transport.size, 2), np.uint8)
            transport.allgather(np.array([change.restored, change.unsent], np.uint8), told)
            restored, unsent = told.max(axis=0).astype(bool).tolist()
            change = change._replace(restored=restored, unsent=unsent)
        self.forget()
        return change

    # -- inside --------------------------------------------------------------------------------------------------

    def _before_saving(self, optimizer: torch.optim.Optimizer) -> None:
        self._saved_in_step = self._adoption.hides  # the script may have a hook that saves during a step
        self._adoption.show()
        self._adoption.drop_empty(optimizer)
        if broadcasting():
            self.pending = self.pending._replace(broadcast=True)

    def _after_saving(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        if not broadcasting():
            self._add_momentum(optimizer, saved)
        if self._saved_in_step:
            self._adoption.hide(optimizer)

    def _add_momentum(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        momentum = self._momentum(optimizer)
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for p, key in zip(group["params"], packed["params"], strict=True):
                if p in momentum:
                    saved["state"][key] = {**saved["state"].get(key, {}), **momentum[p]}
        if self.pending.unsent if self.pending.restored else self._state.residual_norm():
            saved[_UNSENT] = True

    def _momentum(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the entries to add to the optimizer's state; none if it was loaded since the last step."""
        return self._adoption.saved_momentum(optimizer) if self._state.step and not self.pending.restored else {}

    def _before_loading(self, optimizer: torch.optim.Optimizer, saved: object) -> Any:
        """Return the state dict without empty entries."""
        self._adoption.show()
        if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
            return None  # torch raises an error about this argument
        self._loads_unsent = bool(saved.get(_UNSENT))
        return {**saved, "state": {key: entry for key, entry in saved["state"].items() if not is_empty_entry(entry)}}

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        self.pending = self.pending._replace(restored=True, unsent=self._loads_unsent)
        self._when_loaded()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
