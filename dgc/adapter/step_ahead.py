"""What the engines of step-ahead error feedback share: errors, warnings, and the state that is saved."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from typing_extensions import override

from dgc.adapter.checks import warn_once
from dgc.adapter.engine import EngineBase
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.stages import as_dgc_error
from dgc.core.saved import EMPTY, require_sound
from dgc.core.step_ahead import StepAhead
from dgc.errors import DGCError, LayoutError

EQUAL = "Give every rank the same options, or load the optimizer's state on all ranks."

_MANY = 10  # edits in a row that are worth a warning


class StepAheadBase(EngineBase):
    """An engine that exchanges updates.

    Attributes:
        ahead: the shared values, and the exchange of updates.
        exchange: the exchange of ``ahead``.
    """

    differing = "their parameters or the optimizer's state"
    ahead: StepAhead
    exchange: Exchange
    _edits = 0  # steps in a row before which some rank's parameters were edited
    _loaded: Sequence[bool] = ()  # for each parameter, whether a reset leaves it as it is

    @abc.abstractmethod
    def _find_edited(self) -> list[bool]:
        """Return for each parameter whether the script has changed it on this rank since the last step."""

    @override
    def meet(self, call: str) -> None:
        if self.ahead.shared:
            self.exchange.meet(call)

    def _warn_of_edits(self) -> None:
        """Warn on rank 0 if only some ranks have edited their parameters, or if edits come in every step."""
        ranks = self.exchange.edited
        self._edits = self._edits + 1 if ranks else 0
        if self.transport.rank or not ranks:
            return
        if len(ranks) < self.between.size:
            warn_once(
                f"the parameters of {', '.join(map(self.between.label, sorted(ranks)))} were changed outside of the "
                "optimizer's step(), and those of other ranks were not: all ranks go on from the mean of their "
                "parameters. If one rank has loaded a checkpoint, load it on all ranks"
            )
        if self._edits == _MANY:
            warn_once(
                f"parameters were changed outside of the optimizer's step() before each of {_MANY} steps: each time, "
                "all that is left is sent uncompressed. error_feedback='classic' does not need that"
            )

    @override
    def fail(self, error: DGCError) -> NoReturn:
        self.ahead.settle()  # with the option late, the other ranks do so before they begin this step
        self.exchange.fail(error)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Return a context in which an error also reaches the other ranks, which are in the same step."""
        try:
            yield
        except Exception as error:
            self.fail(as_dgc_error(error))

    # -- state ---------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self, own: bool = False) -> dict[str, Any]:
        """Return what belongs to a checkpoint of the model; any number of ranks may load it.

        Raises:
            LayoutError: the ranks may differ, and the model and optimizer that are saved beside it as well.
        """
        self._require_equal_ranks()
        noise = {} if self.ahead.noise is None else {"noise": self.ahead.noise.to_list()}
        return {**EMPTY, "step": self.exchange.state.step, "equal": True, "op": "average", **noise}

    @override
    def require_loadable(self, saved: Mapping[str, Any]) -> None:
        require_sound(saved)
        if saved["parameters"]:
            raise LayoutError(
                'the saved compressor state is one of error_feedback="classic"; give the compressor this option, or '
                "load only the model and the optimizer"
            )
        try:
            noise = np.asarray(saved.get("noise", [[], []]), np.float64)
        except (TypeError, ValueError):
            noise = np.array(np.nan)
        if noise.ndim != 2 or len(noise) != 2 or not np.isfinite(noise).all():
            raise LayoutError("the saved noise scale is not two rows of finite numbers: the file is damaged")

    @override
    def _take_state(self, saved: Mapping[str, Any]) -> None:
        self.exchange.reset()
        self.exchange.state.step = saved["step"]
        self.ahead.restart()
        self.ahead.load_noise(saved.get("noise", []))

    @override
    def reset(self) -> None:
        """Write the shared values into the model, except into parameters that the script has changed, as by a load."""
        self.abandon()
        self._loaded = self._find_edited() if self.ahead.shared and not self.exchange.has_failed else ()
        super().reset()
