"""What an engine is in every framework: one model's tensors on one rank, and the exchanges of the core behind them."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np

from dgc.adapter.metrics import EngineMetrics
from dgc.adapter.speed.choice import Choice
from dgc.adapter.states import EMPTY, is_empty
from dgc.core.config import DENSITY_DIGITS, DGCConfig, Schedule
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.records import Hyper, Stats
from dgc.core.kernels.base import Kernels
from dgc.core.layout import Layout, Parameter, make_layout
from dgc.core.state import require_fit, require_place, require_sound
from dgc.core.transport import Transport
from dgc.errors import DGCError, LayoutError, TransportError
from dgc.transport.agreement import agree_or_raise
from dgc.transport.hierarchical import between_nodes


class Adopted(Protocol):
    """What was taken over from an optimizer; the adapters' ``Adoption`` knows the optimizer itself."""

    hyper: Hyper
    active: bool


class EngineBase(EngineMetrics, abc.ABC):
    """Tensors of one model, the options adopted for them, and the exchanges. Construction is collective.

    Attributes:
        names: of the tensors, in registration order.
        transport: connects the ranks; the engine closes it.
        between: what carries gradients: that transport, or one among nodes whose ranks send as one.
        adoption: what was taken over from the optimizer.
        layout: of all tensors that may be exchanged, or of those that are.
        joins: see :class:`~dgc.core.exchange.exchange.Exchange`.
        follows: whether ranks without data make the same update as the others after the latest step.
    """

    what: ClassVar[str]
    """What the tensors are called, for errors."""
    advice: ClassVar[str]
    """What to do when the ranks' tensors differ."""
    updates_entries: ClassVar[bool] = False
    """Whether parameters may be updated by the entries that came alone."""

    names: list[str]
    adoption: Adopted
    layout: Layout

    def __init__(self, config: DGCConfig, transport: Transport) -> None:
        """Set the fields of all engines. Local: no communication."""
        self.transport = transport
        self.between = transport
        self._config = config
        self._choice = Choice(config)
        # Changed in place only: who ends the threads of an engine that was dropped holds this very list.
        self._exchanges: list[Exchange] = []
        self._is_closed = self.follows = False
        self.joins = 0
        self._nodes: list[Transport] = []  # what construction opens beside the caller's transport

    # -- the framework's half ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fail(self, error: DGCError) -> NoReturn:
        """Raise ``error`` here, and on all ranks that are waiting for this one in an exchange.

        Raises:
            DGCError: always.
        """

    @abc.abstractmethod
    def _extra_state(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What this framework saves beside the exchanges' states."""

    @abc.abstractmethod
    def _take_state(self, saved: dict[str, Any]) -> None:
        """Hand a state that is not empty to the exchanges.

        Raises:
            LayoutError: it belongs to another model, rank or number of ranks.
        """

    def _renamed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state under this model's names, where they may differ from those it was saved under."""
        return saved

    def _decide(self) -> None:
        """Before the state is looked at: find out what became of the latest step, if that was not reported."""

    def _clear(self) -> None:
        """Forget, after a reset, what outlives a step."""

    # -- construction --------------------------------------------------------------------------------------------

    def _agree_on_options(self) -> None:
        agree_or_raise(self.transport, self._config.describe, "options of the compressor")
        self.between = between_nodes(self.transport, self._config.hierarchical)
        if self.between is not self.transport:
            self._nodes = [self.between]
        with self._closed_if_it_fails():
            self._choice.measure(self.between, self.updates_entries)

    def _place(self, parameters: Sequence[Parameter], kernels: Kernels | None = None) -> Layout:
        """Lay out all tensors of an exchange, with the buckets that are sent dense. Local: no communication.

        Args:
            parameters: the tensors.
            kernels: that work on them; None for those of the CPU.
        """
        on_device = kernels is not None and kernels.on_device
        return self._choice.placed(make_layout(parameters, self._config), on_device)

    def _agree_on_tensors(self, build: Callable[[], Layout]) -> None:
        """Run this rank's part of the construction on all ranks, and compare what came of it.

        Args:
            build: sets :attr:`adoption` and returns the layout; its error is raised on all ranks.

        Raises:
            DGCError: tensors, shapes, types or their options differ between ranks, or ``build`` failed on one.
        """

        def described() -> dict[str, str]:
            self.layout = build()
            hyper = self.adoption.hyper
            options = zip(hyper.momentum, hyper.nesterov, hyper.weight_decay, strict=True)
            ways = (" sent dense" * (i in self.layout.chosen) for i in range(len(self.layout.parameters)))
            return {
                name: f"{text} momentum={m} nesterov={n} weight_decay={w}{way}"
                for (name, text), (m, n, w), way in zip(self.layout.describe().items(), options, ways, strict=True)
            }

        with self._closed_if_it_fails():
            agree_or_raise(self.transport, described, self.what, LayoutError, self.advice)
        # A compressor that is dropped without close() must not leave threads and buffers behind. Not at exit, where
        # the other ranks may be gone already.
        self._at_end = weakref.finalize(self, close_all, self._exchanges, *self._nodes, self.transport)
        self._at_end.atexit = False

    @contextlib.contextmanager
    def _closed_if_it_fails(self) -> Iterator[None]:
        """What construction has opened beside the caller's transport is closed where an error ends it."""
        try:
            yield
        except BaseException:
            for each in self._nodes:
                each.close()
            raise

    # -- what it does --------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """The counters of all exchanges together."""
        if len(self._exchanges) == 1:
            return self._exchanges[0].stats
        joined = Stats()
        for exchange in self._exchanges:
            joined.steps = max(joined.steps, exchange.stats.steps)
            joined.refused_steps = max(joined.refused_steps, exchange.stats.refused_steps)
            joined.last.add(exchange.stats.last)
            joined.total.add(exchange.stats.total)
        return joined

    def residual_norm(self) -> float:
        """L2 norm of what this rank has not sent yet."""
        self._decide()
        return float(np.sqrt(sum(e.residual_norm() ** 2 for e in self._exchanges)))

    def describe(self) -> dict[str, Any]:
        """What the next step will do, in plain values: see ``compression.describe()``."""
        self._decide()
        layouts = [exchange.layout for exchange in self._exchanges] or [self.layout]
        updated = self.how_updated
        if updated == "sparse" and not any(layout.sparse_numel for layout in layouts):
            updated = "dense: nothing is sparsified"
        each = [exchange.describe() for exchange in self._exchanges]
        if len(each) == 1:
            (whole,) = each
        else:
            config, layout = self._config, self.layout
            schedule = Schedule(config.sparsity, config.rampup_begin_step, config.rampup_step)
            step = max((d["step"] for d in each), default=0)
            whole = {
                "step": step,
                "density": round(schedule.density(step), DENSITY_DIGITS),
                "rampup_begin_step": schedule.begin,
                "rampup_end_step": schedule.ramp_end(),
                "parameters": layout.numel,
                "small": config.small,
                "sparsified_share": layout.sparse_numel / layout.numel if layout.numel else 0.0,
                "buckets": sum(d["buckets"] for d in each) or len(layout.buckets),
                "transport": self.transport.name,
                "ranks": self.transport.size,
                "kernels": each[0]["kernels"] if each else None,
            }
        nodes = self.between.rank_info().get("nodes")
        return {**whole, "nodes": nodes, "exchange": self._choice.describe(layouts), "updates": updated}

    @property
    def how_updated(self) -> str:
        """Whether the latest step's results were applied as entries, or why they were dense."""
        return "dense"

    def require_open(self, what: str) -> None:
        """Refuse what would ask the other ranks.

        Raises:
            TransportError: the engine was closed.
        """
        if self._is_closed:
            raise TransportError(
                f"{what} was called after close() of the compressor; call it before, or build a new one"
            )

    def require_between_steps(self, what: str, *, whole: bool = False) -> None:
        """Refuse what would use the transport, or read the state, beside a step.

        Args:
            what: is called, for the message.
            whole: also refuse it after a step that failed, which is half in the state.

        Raises:
            LayoutError: a step is under way on this rank, or one has failed.
        """
        for exchange in self._exchanges:
            (exchange.require_whole if whole else exchange.require_between_steps)(what)

    # -- saving, ending ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: that of :meth:`dgc.core.exchange.exchange.Exchange.state_dict`, of all exchanges in one.

        Raises:
            LayoutError: called in the middle of a step, or after one that failed.
        """
        self._decide()
        states = [exchange.state_dict() for exchange in self._exchanges]
        parameters = {name: entry for state in states for name, entry in state["parameters"].items()}
        whole = {**EMPTY, **(states[0] if states else {}), "parameters": parameters, **self.between.rank_info()}
        return {**whole, **self._extra_state(states)}

    def require_loadable(self, saved: dict[str, Any]) -> None:
        """Look whether :meth:`load_state_dict` will take a state; changes nothing. Local: no communication.

        Raises:
            LayoutError: it belongs to another model, rank, number of ranks or op, or is damaged.
        """
        if is_empty(saved):
            return
        require_place(saved, op=self._config.op, **self.between.rank_info())
        require_sound(saved)
        _require_extras(saved)
        saved = self._renamed(saved)
        # Tensors whose gradients are sent otherwise have no state.
        others = set(self.names) - set(self.layout.lengths())
        without = self.names if "groups" in saved else ()
        layout = self.layout
        sparsified, small = self._choice.kinds(layout, saved["parameters"])
        require_fit(saved, sparsified, layout.lengths(), {*others, *without}, small=small)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state of this rank; an empty one resets. Call it on all ranks.

        Raises:
            LayoutError: it belongs to another model, rank or number of ranks, or is damaged; nothing is changed then.
        """
        if is_empty(saved):
            self.reset()
            return
        self.require_loadable(saved)
        self.abandon()
        self._take_state(saved)

    def reset(self) -> None:
        """Forget residuals, momentum, the step and the statistics."""
        self.abandon()
        for exchange in self._exchanges:
            exchange.reset()
        self._clear()

    def abandon(self) -> None:
        """Leave a step behind that an exception or an error ended; call it on all ranks."""
        for exchange in self._exchanges:
            exchange.abandon()

    def close(self, keep_transport: bool = False) -> None:
        """End the communication threads and, unless it shall be kept, the transport."""
        self._is_closed = True
        self.use_log(None)
        self._at_end.detach()
        close_all(self._exchanges, *self._nodes, *([] if keep_transport else [self.transport]))


def _require_extras(saved: Mapping[str, Any]) -> None:
    """What the frameworks add to a state must be what they can read.

    Raises:
        LayoutError: it is not.
    """
    for key in ("names", "kinds"):
        value = saved.get(key, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            raise LayoutError(f"the saved compressor state has {key}={value!r:.80}, not a list of names; it is damaged")
    groups = saved.get("groups", ())
    for group in groups if isinstance(groups, (list, tuple)) else [groups]:
        whole = isinstance(group, Mapping) and {"names", "step", "rate"} <= set(group)
        if not whole or any(name not in saved["parameters"] for name in group["names"]):
            raise LayoutError("the saved compressor state has a group without its variables; it is damaged")


def close_all(exchanges: list[Exchange], *transports: Transport) -> None:
    """End the threads; transports are left alone when one of them still waits in one for a rank that is gone."""
    if all([exchange.close() for exchange in exchanges]):
        for transport in transports:
            transport.close()
