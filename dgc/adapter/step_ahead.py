"""What the engines of step-ahead error feedback share: errors, warnings, and the state that is saved."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from typing_extensions import override

from dgc.adapter.checks import warn_once
from dgc.adapter.engine import EngineBase
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.stages import as_dgc_error
from dgc.core.saved import EMPTY, is_empty, require_sound
from dgc.core.step_ahead import NOISE, StepAhead
from dgc.errors import DGCError, LayoutError

EQUAL = "Give every rank the same options, or load the optimizer's state on all ranks."

_MANY = 10  # edits in a row that are worth a warning


class StepAheadBase(EngineBase):
    """An engine that exchanges updates.

    Attributes:
        ahead: the shared values, and the exchange of updates.
        exchange: the exchange of ``ahead``.
    """

    ahead: StepAhead
    exchange: Exchange
    _edits = 0  # steps in a row before which some rank's parameters were edited

    @abc.abstractmethod
    def _convert(self, array: Any) -> Any:
        """Return an array as the kind that ``ahead`` works on."""

    @abc.abstractmethod
    def _to_host(self, values: Any) -> np.ndarray:
        """Return values of that kind as an array on the host."""

    @abc.abstractmethod
    def _write_shared(self) -> None:
        """Write what ``ahead`` holds into the model."""

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
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; after :meth:`average` it is small, and any rank may load it."""
        if not self.ahead.is_averaged:
            return super().state_dict()
        step = self.exchange.state.step
        return {**EMPTY, "step": step, "parameters": {}, **self.between.rank_info(), "op": "average", **self._noise()}

    @override
    def _extra_state(self) -> dict[str, Any]:
        shared = {n: self._to_host(theta) for n, theta in zip(self.names, self.ahead.shared, strict=True)}
        return {"shared": shared, **self._noise()}

    def _noise(self) -> dict[str, Any]:
        return {} if self.ahead.noise is None else {"noise": self.ahead.noise.to_list()}

    @override
    def own_part(self, states: list[Any], resize: bool, begin: int) -> dict[str, Any]:
        if _is_averaged(states[0]):
            own: dict[str, Any] = states[0]
            return own
        own = super().own_part(states, resize, begin)
        parameters = own.get("parameters")
        if self.ahead.noise is None or not isinstance(parameters, dict) or NOISE not in parameters:
            return own
        # The message has no memory, and its length depends on the number of ranks.
        return {**own, "parameters": {**parameters, NOISE: {"u": np.zeros_like(self.ahead.noise.message)}}}

    @override
    def require_loadable(self, saved: dict[str, Any]) -> None:
        noise = saved.get("noise", [[], []])
        if np.ndim(noise) != 2 or len(noise) != 2 or not np.isfinite(noise).all():
            raise LayoutError("the saved noise scale is not two rows of finite numbers: the file is damaged")
        if _is_averaged(saved):
            require_sound(saved)
            return
        super().require_loadable(saved)
        if is_empty(saved):
            return
        saved = self._renamed(saved)
        if "shared" not in saved:
            raise LayoutError(
                'the saved compressor state is one of error_feedback="classic"; give the compressor this option, or '
                "load only the model and the optimizer"
            )
        shared = saved["shared"]
        for i, name in enumerate(self.names):
            values = np.asarray(shared.get(name, ()))
            if values.size != self.ahead.layout.parameters[i].numel or not np.isfinite(values).all():
                raise LayoutError(
                    f"the saved shared values of {name!r} do not fit, or are not finite: the file is damaged"
                )

    @override
    def _take_state(self, saved: dict[str, Any]) -> None:
        if "noise" in saved:
            self.ahead.load_noise(saved["noise"])
        if _is_averaged(saved):
            self.exchange.reset()
            self.exchange.state.step = saved["step"]
            self.ahead.tensors, self.ahead.is_averaged = [], True
        else:
            saved = self._renamed(saved)
            self.exchange.load_state_dict(saved)
            self.ahead.start([self._convert(saved["shared"][n]) for n in self.names])
            self.ahead.is_averaged = False
            self._write_shared()


def _is_averaged(saved: dict[str, Any]) -> bool:
    return bool(saved) and not is_empty(saved) and not saved.get("parameters")
