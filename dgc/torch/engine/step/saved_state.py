"""What becomes of the compressor when the optimizer's state is saved, loaded or broadcast.

A state dict of the optimizer holds neither u nor v, which belong to one rank and one moment. Whoever loads one without
the compressor's own state goes back to another moment: what the compressor remembers of the run that is left is
dropped, on every rank.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dgc.core.transport import Transport
from dgc.errors import ConfigError
from dgc.torch.engine.adoption import Adoption, is_empty, is_sgd
from dgc.torch.engine.step.callers import frames

_ADVICE = "dgc.torch.save_checkpoint() and load_checkpoint() keep both"


@dataclass(frozen=True)
class Change:
    """What happened to the optimizer's state since the last step.

    Attributes:
        restored: a state was loaded into it, and none into the compressor.
        broadcast: it was broadcast.
    """

    restored: bool = False
    broadcast: bool = False


class SavedState:
    """Stands at the doors through which the state of one optimizer leaves and comes."""

    def __init__(self, adoption: Adoption) -> None:
        """Begin with nothing loaded.

        Args:
            adoption: the options that are taken from the optimizer.
        """
        self._adoption = adoption
        self._loaded = self._broadcast = self._kept = self._warned = False

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Be told of this optimizer's saving and loading; it does not keep this object alive."""
        told = weakref.ref(self)

        def before_saving(saving: torch.optim.Optimizer) -> None:
            itself = told()
            if itself is not None:
                itself._before_saving(saving)

        def before_loading(loading: torch.optim.Optimizer, saved: Any) -> Any:
            itself = told()
            return None if itself is None else itself._before_loading(loading, saved)

        def after_loading(loading: torch.optim.Optimizer) -> None:
            itself = told()
            if itself is not None:
                itself._loaded = True

        optimizer.register_state_dict_pre_hook(before_saving)
        optimizer.register_load_state_dict_pre_hook(before_loading)
        optimizer.register_load_state_dict_post_hook(after_loading)

    def compressor_loaded(self) -> None:
        """The compressor got a state of its own: it belongs to what is loaded into the optimizer before the next step.

        All ranks call it together, as they do :meth:`forget`.
        """
        self.forget()
        self._kept = True

    def forget(self) -> None:
        """Nothing was loaded or broadcast."""
        self._loaded = self._broadcast = self._kept = False

    def mark(self) -> tuple[bool, bool, bool]:
        """What was loaded or broadcast until now, for :meth:`go_back`."""
        return self._loaded, self._broadcast, self._kept

    def go_back(self, mark: tuple[bool, bool, bool]) -> None:
        """What was loaded or broadcast since then was taken back."""
        self._loaded, self._broadcast, self._kept = mark

    def change(self, transport: Transport) -> Change:
        """What happened since the last step; collective after a broadcast.

        Raises:
            TransportError: the ranks could not be asked.
        """
        restored = self._loaded and not self._kept
        if self._broadcast:
            # The root alone may have loaded what all ranks have now.
            told = np.empty((transport.size, 1), np.uint8)
            transport.allgather(np.array([restored], np.uint8), told)
            restored = bool(told.any())
        change = Change(restored, self._broadcast)
        self.forget()
        return change

    def warn_of_loss(self, steps: int, momentum: bool) -> None:
        """Say once what a state that was loaded into the optimizer alone does not bring back.

        Args:
            steps: that the compressor has made in the run that was left.
            momentum: whether the optimizer's momentum came with the state, or it has none.
        """
        if self._warned or (not steps and momentum):
            return
        self._warned = True
        lost = [] if not steps else [f"what was not sent yet in the {steps} steps before is dropped"]
        lost += [] if momentum else ["momentum begins at 0"]
        warnings.warn(
            f"a state was loaded into the optimizer, but none into the compressor, which holds residuals and momentum: "
            f"{' and '.join(lost)}; {_ADVICE}",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _before_saving(self, optimizer: torch.optim.Optimizer) -> None:
        self._adoption.show()
        self._adoption.drop_empty(optimizer)
        if broadcasting():
            self._broadcast = True

    def _before_loading(self, optimizer: torch.optim.Optimizer, saved: Any) -> Any:
        """The state dict without empty entries, and with the options that an earlier version took out of it."""
        self._adoption.show()
        if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
            return None  # torch will say what is wrong with it
        state = {key: entry for key, entry in saved["state"].items() if not is_empty(entry)}
        mended = {**saved, "state": state}
        groups, own = saved.get("param_groups", ()), optimizer.param_groups
        options = self._adoption.options
        had = [{option: group[option] for option in options if group.get(option)} for group in own]
        had = [kept if self._adoption.concerns(group) else {} for group, kept in zip(own, had, strict=True)]
        if state or len(groups) != len(own) or not any(had):
            return mended
        if all(_was_emptied(g, options) for g, kept in zip(groups, had, strict=True) if kept):
            mended["param_groups"] = [{**group, **kept} for group, kept in zip(groups, had, strict=True)]
            certain = len(saved["state"]) > 0
            warnings.warn(
                f"the loaded state dict says {', '.join(f'{option}=0' for option in options)}, which "
                f"{'an' if certain else 'is what an'} earlier version of this package saved for options that the "
                f"compressor applies; those of the optimizer are kept: {had}. To go on without them set them to 0 in "
                "param_groups after loading",
                RuntimeWarning,
                stacklevel=2,
            )
        return mended


def require_own_options(optimizer: torch.optim.Optimizer | None) -> None:
    """Look whether a state dict of an earlier version was loaded into an optimizer that is about to be wrapped.

    Raises:
        ConfigError: it was: momentum and weight decay are gone.
    """
    if optimizer is None or not is_sgd(optimizer):
        return
    options = ("momentum", "nesterov", "weight_decay")
    if not all(_was_emptied(group, options) for group in optimizer.param_groups):
        return
    if any(entry == {} for entry in optimizer.state.values()):
        raise ConfigError(
            "the optimizer holds the state dict of an earlier version of this package, which saved 0 for the momentum "
            "and weight decay that the compressor applies; load it after wrapping the optimizer, or set both in "
            "param_groups again"
        )
    line = {option: optimizer.defaults[option] for option in options if optimizer.defaults.get(option)}
    if line and not optimizer.state:
        warnings.warn(
            f"the optimizer was built with {line}, but all its groups hold 0, as in a state dict that an earlier "
            "version of this package saved; if that was loaded, load it after wrapping the optimizer instead",
            RuntimeWarning,
            stacklevel=2,
        )


def broadcasting() -> bool:
    """Whether ``hvd.broadcast_optimizer_state`` is among the callers."""
    return any(frame.f_code.co_name == "broadcast_optimizer_state" for frame in frames(12))


def _was_emptied(group: Mapping[str, Any], options: tuple[str, ...]) -> bool:
    """Whether a group says 0 for all options, in the types that earlier versions wrote (and torch does by default)."""
    return all(option not in group or (type(group[option]) in (int, bool) and not group[option]) for option in options)
