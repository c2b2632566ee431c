"""The base class of every framework's engine. An engine holds one model's tensors on one rank and their exchange."""

from __future__ import annotations

import abc
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

from dgc.adapter.agreement import agree_or_raise, require_agreement
from dgc.adapter.checks import warn_of_more_steps
from dgc.core.collectives import Transport
from dgc.core.config import DENSITY_DIGITS, DGCConfig, Schedule
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.stats import Stats
from dgc.core.exchange.step import Hyper
from dgc.core.layout import Layout
from dgc.core.message import Disagreement
from dgc.core.saved import EMPTY, require_fit, require_op, require_sound
from dgc.errors import DGCError, LayoutError, TransportError
from dgc.transport.hierarchical import between_nodes

logger = logging.getLogger("dgc")

Observer: TypeAlias = Callable[[dict[str, Any]], Any]

# The result of a compressor's describe() in a job of one process, where nothing is exchanged.
NO_EXCHANGE: Final[dict[str, Any]] = {"density": 1.0, "sparsified_share": 0.0, "transport": "none", "ranks": 1}

CONNECTED: Final = (
    "a compressor that is bound to a model cannot be copied or pickled, as it holds this rank's residuals and a "
    "connection to the other ranks: copy it before it is bound. Or call average(optimizer), build a new one on every "
    "rank, and hand it this one's state with load_state_dict(compression.state_dict())"
)


class EngineBase(abc.ABC):
    """The tensors of one model, the options adopted for them, and their exchange. Construction is collective.

    Attributes:
        what: how errors call the tensors: "parameters" or "variables".
        advice: what to do when the ranks' tensors differ, for the error.
        differing: what belongs to a checkpoint and may differ between the ranks, for the error.
        names: the tensors' names, in registration order.
        transport: connects the ranks; the engine closes it.
        between: the transport that carries gradients; with ``hierarchical``, one that connects nodes.
        adoption: the options that were taken over from the optimizer.
        layout: the layout of all tensors. Once it is known which tensors are exchanged, it holds only these.
        observers: functions that are called with the figures of each step.
        follows: whether ranks without data must make the same update as the others after the latest step.
        is_open: whether it was not closed.
    """

    what: ClassVar[str]
    advice: ClassVar[str]
    differing: ClassVar[str] = "what they have not sent"

    names: list[str]
    adoption: Any
    layout: Layout

    def __init__(self, config: DGCConfig, transport: Transport) -> None:
        self.transport = transport
        self.between = transport
        self._config = config
        self._exchange: Exchange | None = None  # None until the adapter knows which tensors are exchanged
        self._at_end: weakref.finalize[Any, Any] | None = None
        self.is_open, self.follows = True, False
        self.observers: list[Observer] = []
        self._nodes: list[Transport] = []  # the transport between nodes, if the engine has opened one

    # -- the framework's half ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fail(self, error: DGCError) -> NoReturn:
        """Raise ``error`` here, and on all ranks that are waiting for this one in an exchange."""

    @abc.abstractmethod
    def _take_state(self, saved: Mapping[str, Any]) -> None:
        """Load a state that is not empty into the exchange."""

    def _extra_state(self) -> dict[str, Any]:
        """Return the values that this framework saves in addition to the exchange's state."""
        return {}

    def _renamed(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state with the names of this model, which may differ from the saved ones."""
        return saved

    def _clear(self) -> None:  # noqa: B027
        """Forget, at a reset, what a framework keeps from one step to the next."""

    # -- construction --------------------------------------------------------------------------------------------

    def _agree_on_options(self) -> None:
        agree_or_raise(self.transport, self._config.describe, "options of the compressor")
        self.between = between_nodes(self.transport, self._config.hierarchical)
        if self.between is not self.transport:
            self._nodes = [self.between]

    def _agree_on_tensors(self, build: Callable[[], Layout]) -> None:
        """Run ``build`` on all ranks, and compare the layouts that it returns and the adopted options."""

        def described() -> dict[str, str]:
            self.layout = build()
            if self._config.steps_ahead:
                return self.layout.describe()
            hyper = self.adoption.hyper
            options = zip(hyper.momentum, hyper.nesterov, hyper.weight_decay, strict=True)
            return {
                name: f"{text} momentum={m} nesterov={n} weight_decay={w}"
                for (name, text), (m, n, w) in zip(self.layout.describe().items(), options, strict=True)
            }

        try:
            agree_or_raise(self.transport, described, self.what, LayoutError, self.advice)
        except BaseException:  # the transport belongs to the caller, who must close it
            for each in self._nodes:
                each.close()
            raise
        self._close_when_dropped()

    def _close_when_dropped(self) -> None:
        """Arrange that a dropped engine ends its threads and frees its buffers. Call it for each new exchange."""
        if self._at_end is not None:
            self._at_end.detach()
        self._at_end = weakref.finalize(self, _close, self._exchange, *self._nodes, self.transport)
        self._at_end.atexit = False  # at the end of the process, the other ranks may be gone

    # -- options that differ in a step -----------------------------------------------------------------------------

    def _name_difference(self, error: DGCError, hyper: Hyper, rate_name: str) -> None:
        """If ``error`` says that ranks disagree about ``hyper``, raise one that names the option; this is collective.

        ``rate_name`` is how the framework calls the learning rate with the number ``{}``.
        """
        if not isinstance(error, Disagreement) or self.between is not self.transport:
            return
        assert self._exchange is not None, "a step has begun"
        names = [p.name for p in self._exchange.layout.parameters]
        shown: dict[str, object] = {"a state was loaded": hyper.restored}
        rates = enumerate(hyper.learning_rates)
        shown.update((rate_name.format(i), float(f"{rate:.5e}")) for i, rate in rates)
        for option in ("momentum", "nesterov", "weight_decay", "gain"):
            values = zip(names, getattr(hyper, option), strict=True)
            shown.update((f"{option} of {name}", value) for name, value in values)
        shown["without a gradient"] = [names[i] for i in hyper.absent]
        require_agreement(self.transport, shown, "the optimizer's options", advice=str(error))

    # -- statistics and description ------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """The exchange's counters."""
        return Stats() if self._exchange is None else self._exchange.stats

    def _after_step(self) -> None:
        """Warn on rank 0 if the training is longer than ``steps=`` says, and call the observers."""
        assert self._exchange is not None, "a step has ended"
        steps = self._config.steps
        if steps is not None and self._exchange.state.step == steps + 1 and self.transport.rank == 0:
            warn_of_more_steps(steps)
        if self.observers:
            self._tell_observers()

    def _tell_observers(self) -> None:
        assert self._exchange is not None, "a step has ended"
        stats, refused = self._exchange.stats, self._exchange.refused
        step = self._exchange.state.step - (not refused)
        for observer in list(self.observers):
            try:
                observer({"step": step, "refused": refused, **stats.last.as_dict()})
            except Exception:  # an error such as a full disk is no reason to stop the other ranks
                logger.warning(
                    "%r of on_step() failed in step %d and is not called again", observer, step, exc_info=True
                )
                self.observers.remove(observer)

    def residual_norm(self) -> float:
        """Return the L2 norm of the gradients that this rank has not sent yet."""
        return 0.0 if self._exchange is None else self._exchange.state.residual_norm()

    def describe(self) -> dict[str, Any]:
        """Return what the next step will do, as plain values: see ``compression.describe()``."""
        config, exchange = self._config, self._exchange
        layout = self.layout if exchange is None else exchange.layout
        schedule = Schedule(config.sparsities, config.rampup_begin_step, config.rampup_step)
        step, ranks = 0 if exchange is None else exchange.state.step, self.between.rank_info()
        return {
            "step": step,
            "density": round(schedule.density(step), DENSITY_DIGITS),
            "error_feedback": "classic" if config.error_feedback == "auto" else config.error_feedback,
            "rampup_begin_step": schedule.begin,
            "rampup_end_step": schedule.ramp_end(),
            "parameters": layout.numel,
            "small": config.small,
            "sparsified_share": layout.sparse_numel / layout.numel if layout.numel else 0.0,
            "buckets": len(layout.buckets),
            "exchange": None if exchange is None else exchange.ways(),
            "transport": self.between.name,
            "ranks": ranks["size"],
            "kernels": None if exchange is None else exchange.kernels.name,
            "nodes": ranks.get("nodes"),
        }

    @property
    def is_equal(self) -> bool:
        """Whether all that a checkpoint holds is known to be the same on all ranks: see :meth:`average`."""
        return self._exchange is None or self._exchange.state.is_equal

    def require_open(self, what: str) -> None:
        """Refuse, after close(), a call that needs the other ranks."""
        if not self.is_open:
            raise TransportError(
                f"{what} was called after close() of the compressor; call it before, or build a new one"
            )

    def meet(self, call: str) -> None:
        """Raise an error on all ranks, also on those that make a step, unless all of them make this call. Collective.

        Before the first step, and with ``hierarchical``, nothing is compared.
        """
        if self._exchange is not None and not self.is_equal and self.between.inside is None:
            self._exchange.meet(call)

    def require_between_steps(self, what: str, *, whole: bool = False) -> None:
        """Refuse, in the middle of a step, a call that uses the transport or reads the state."""
        if self._exchange is not None:
            (self._exchange.require_whole if whole else self._exchange.require_between_steps)(what)

    # -- saving, ending ------------------------------------------------------------------------------------------

    def average(self, optimizer: Any = None) -> None:
        """Make the compressor's state equal on all ranks, if ``optimizer`` is given. Collective, between steps.

        The parameters and the optimizer's state already are equal.
        """
        exchange = self._exchange
        if optimizer is not None and exchange is not None:
            exchange.require_whole("average()")
            if not self.is_equal:
                self.meet("average(optimizer)")
                exchange.average()

    def state_dict(self, own: bool = False) -> dict[str, Any]:
        """Return the exchange's state, and what the framework adds.

        Raises:
            LayoutError: the ranks may differ, and ``own`` is not set; or the state is not that of a whole step.
        """
        if self._exchange is None:
            return {**EMPTY, "parameters": {}, **self._extra_state()}
        state = self._exchange.state_dict()
        if not own:
            self._require_equal_ranks()
        return {**state, **self._extra_state()}

    def _require_equal_ranks(self) -> None:
        if not self.is_equal:
            raise LayoutError(
                f"the ranks differ in {self.differing}: call compression.average(optimizer) on all ranks, and "
                "before the next step save the states of one rank, which any number of ranks can load"
            )

    def require_loadable(self, saved: Mapping[str, Any]) -> None:
        """Require that :meth:`load_state_dict` will accept a state that is not empty. Not collective."""
        require_sound(saved)
        require_op(saved, self._config.op)
        if not saved.get("equal"):
            raise LayoutError(
                "the saved compressor state is that of one rank: call compression.average(optimizer) on all ranks, and "
                "then save state_dict()"
            )
        saved = self._renamed(saved)
        # A tensor has no state here if another library averages its gradients.
        others = set(self.names) - {p.name for p in self.layout.parameters}
        require_fit(saved, self.layout, self.names if "kinds" in saved else others)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state that :meth:`require_loadable` accepts, after :meth:`abandon`. {} resets.

        All ranks load the same state.
        """
        if not saved:
            self.reset()
        else:
            self._take_state(saved)

    def reset(self) -> None:
        """Forget residuals, momentum, the step and the statistics."""
        self.abandon()
        if self._exchange is not None:
            self._exchange.reset()
        self._clear()

    def until_all_joined(self, step: Callable[[], object]) -> int:
        """Call ``step``, which exchanges once without data, until all ranks have joined.

        Returns:
            The rank, within the exchange, that joined last (the highest of several).
        """
        assert self._exchange is not None, "it has exchanged before"
        ranks, joined = set(range(self.between.size)), set(self._exchange.joined)
        try:
            while joined != ranks:
                before = joined
                step()
                joined = set(self._exchange.joined)
        finally:
            self._exchange.joined = {}
        return max(ranks - before)

    def abandon(self) -> bool:
        """Give up a step that an error ended. Call it on all ranks.

        Like ``Exchange.abandon``, return whether the unfinished step had all its gradients on all ranks.
        """
        return self._exchange is None or self._exchange.abandon()

    def close(self, keep_transport: bool = False) -> None:
        """End the communication thread, and close the transport unless ``keep_transport`` is set."""
        self.is_open = False
        if self._at_end is not None:
            self._at_end.detach()
        _close(self._exchange, *self._nodes, *([] if keep_transport else [self.transport]))


def _close(exchange: Exchange | None, *transports: Transport) -> None:
    """End the exchange's thread; then close the transports, unless the thread is still waiting in one of them."""
    if exchange is None or exchange.close():
        for transport in transports:
            transport.close()


def warn_of_dropped(state: Mapping[str, Any]) -> None:
    """Warn that a job of one process drops a state that holds residuals or momentum."""
    if state.get("parameters"):  # with step-ahead there are none
        warnings.warn(
            "one process compresses nothing: what the ranks had not sent, and the compressor's momentum, are dropped",
            RuntimeWarning,
            stacklevel=4,
        )
