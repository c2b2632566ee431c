"""One model's parameters on one rank, bound to an exchange of the core. Ways A and B both stand on this.

Every torch tensor becomes an array here, and every parameter has one index: its place among the parameters that the
compressor was built for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dgc.core.config.checks import as_loss_scale
from dgc.core.config.config import DGCConfig
from dgc.core.exchange.encoders.choose import runs_on_devices
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.records import Hyper, Stats
from dgc.core.state.layout import make_layout
from dgc.core.transport import Transport
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.adoption import Adoption
from dgc.torch.device_tensors import HostTensors, tensors_for
from dgc.torch.horovod import averages_first_pass
from dgc.torch.last_step import LastStep, refuse_velocity
from dgc.torch.saved_state import Change
from dgc.torch.sparse_gradients import SparseGradients
from dgc.torch.step_watch import StepWatch, learning_rates_of
from dgc.torch.tensors import Result, as_array, describe, fingerprint, samples
from dgc.transport.agreement import agree_or_raise, require_replicas

_PATIENCE = 1.0
"""Seconds of waiting for other ranks after which it is checked whether they are still there."""


Named = Sequence[tuple[str, torch.Tensor]]


class Engine:
    """Parameters, their optimizer's adopted options, and the exchange. Construction is collective.

    Attributes:
        parameters: the compressed tensors in registration order.
        names: their names.
        adoption: what was taken over from their optimizer.
        steps: knows that optimizer, and stands before its steps.
        learning_rates: those of the step that begins, where they are not that optimizer's; the ranks must share them.
        on_step_begin: called before the first gradient of each step is handed over, if set.
        check_peers: called now and then while waiting for other ranks, if set; raises when a rank will never come.
    """

    def __init__(
        self,
        named: Named | Callable[[], Named],
        config: DGCConfig,
        transport: Transport,
        *,
        optimizer: torch.optim.Optimizer | None,
        loss_scale: Any = 1.0,
    ) -> None:
        """Agree with the other ranks and allocate the state.

        Args:
            named: (name, parameter) pairs, or a function that makes them; its error is then raised on all ranks.
            config: the options.
            transport: connects the ranks; the engine closes it.
            optimizer: whose options are adopted.
            loss_scale: a number, a function or a GradScaler.

        Raises:
            DGCError: parameters, shapes, types or options differ between ranks, or construction failed on a rank.
        """
        self.names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        self.transport = transport
        self.check_peers: Callable[[], None] | None = None
        self.on_step_begin: Callable[[], None] | None = None
        self.learning_rates: tuple[float, ...] = ()
        self._config = config
        self._results: dict[int, Result] = {}
        self._extra_bytes = 0
        self._replicas_compared = self._results_compared = False
        self._error: DGCError | None = None
        self._untold = False  # whether the other ranks will hear of the error in the next step
        self._opened = False  # whether the other ranks know that this one has begun the step

        def build() -> dict[str, str]:
            pairs = named() if callable(named) else named
            self.names = [n for n, _ in pairs]
            self.parameters = [p for _, p in pairs]
            self._sparse = SparseGradients(self.names, self.parameters)
            self._loss_scale = _loss_scale(loss_scale)
            self._tensors = tensors_for(self.parameters) if runs_on_devices(config) else HostTensors()
            self._exchange = self._new_exchange()
            self.adoption = Adoption(self.parameters, self.names, optimizer, config, self._absorb)
            return self._describe()

        agree_or_raise(transport, config.describe, "options of the compressor")
        advice = "Build the same model and optimizer on every rank."
        agree_or_raise(transport, build, "parameters", LayoutError, advice)
        self._last = LastStep(self.parameters, lambda: self._exchange)
        self.steps = StepWatch(self.parameters, self.adoption, lambda: self._error is not None, self._last)
        # A compressor that is dropped without close() must not leave its thread and buffers behind. Not at exit,
        # where the other ranks may be gone already.
        self._exchanges = [self._exchange]
        weakref.finalize(self, _close_all, self._exchanges, transport).atexit = False

    # -- one step ------------------------------------------------------------------------------------------------

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """The parameter's index, or None if the compressor was not built for it."""
        return self.adoption.index_of(parameter)

    def submit(
        self, index: int, gradient: torch.Tensor, result: torch.Tensor, decayed: torch.Tensor | None = None
    ) -> None:
        """Hand over a gradient.

        Args:
            index: the parameter's place.
            gradient: this rank's gradient, of the parameter's shape.
            result: of the same shape; holds the outcome after :meth:`finish`. It may be ``gradient``.
            decayed: what the weight decay is multiplied by, of the same shape; the parameter itself if None.

        Raises:
            LayoutError: another shape or device than the parameter's, or given twice in this step.
            DGCError: this or another rank failed.
        """
        self._begin(index)
        parameter = self.parameters[index]
        if index in self._sparse:
            refused = self._sparse.refusal(index, gradient)
            if refused is not None:
                self.fail(refused)
            result.zero_()
            return
        if gradient.shape != parameter.shape or gradient.device != parameter.device:
            self.fail(
                LayoutError(
                    f"the gradient of {self.names[index]!r} is {tuple(gradient.shape)} on {gradient.device}, the "
                    f"parameter is {tuple(parameter.shape)} on {parameter.device}; build a new compressor when "
                    "parameters change"
                ),
                index,
            )
        self._results[index] = place = self._tensors.result(result)
        decay = self.adoption.hyper.weight_decay[index]
        try:
            self._exchange.submit(
                self._places[index],
                self._tensors.array(gradient),
                place.array,
                self._tensors.array(parameter if decayed is None else decayed) if decay else None,
                place.limit,
                self._tensors.ready(),
            )
        except DGCError as error:
            self._fail_with(error)
            raise

    def finish(self) -> None:
        """Wait for all results of the step. Calling it again before the next step does nothing.

        Raises:
            DGCError: this or another rank failed, or a gradient is missing.
        """
        if self._error is not None:
            raise self._error
        if not self._exchange.in_step:
            self._opened = False
            return
        stand_ins = self._fill_in_sparse()
        try:
            self._exchange.require_complete()
            self._watch_peers()
            self._exchange.finish()
        except DGCError as error:
            self._error, self._opened = error, False
            raise
        finally:
            # Until here the kernels may write to memory that they were given.
            self._tensors.release()
            del stand_ins
        self._conclude()

    def fail(self, error: DGCError, index: int | None = None) -> None:
        """Raise ``error`` here and its text on all other ranks; see :meth:`dgc.core.exchange.exchange.Exchange.fail`.

        Raises:
            DGCError: always; an earlier one, if the other ranks have not heard of it or the engine was left with it.
        """
        self._raise_on_all_ranks(self._open_step(index) or error, index)

    def _raise_on_all_ranks(self, error: DGCError, index: int | None = None) -> None:
        place = None if index is None or index in self._sparse else self._places[index]
        try:
            self._exchange.fail(error, place)
        except DGCError as raised:
            self._fail_with(raised)
            raise

    def _fail_with(self, error: DGCError) -> None:
        """Remember what the exchange has raised, in a step that is over with it."""
        self._error, self._opened = error, False
        self._tensors.release()
        self._untold = self._exchange.owes_failure
        if self._untold:
            self._conclude()  # as the others do

    def is_done(self) -> bool:
        """Whether the results of the latest step are there and were not cleared, and no other step has begun."""
        return self._error is None and not (self._opened or self._exchange.in_step) and self._last.stands

    def require_same_results(self) -> None:
        """Before results are handed back by another ``synchronize()``; collective the first time, then nothing.

        Raises:
            ConfigError: the ranks changed them in different ways.
        """
        if self._results_compared:
            return
        self._results_compared = True
        dense = [None if p.grad is None or p.grad.is_sparse else p.grad for p in self.parameters]
        require_replicas(
            self.transport,
            # A gradient that was taken out of the step counts as 0, which another rank may have put there already.
            {
                n: fingerprint(torch.zeros_like(p) if g is None else g)
                for n, p, g in zip(self.names, self.parameters, dense, strict=True)
            },
            "their gradients were changed in different ways between synchronize() and another synchronize() or step(), "
            "which averages nothing again: make the same change on every rank",
        )

    # -- saving, ending ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """The exchange's counters."""
        return self._exchange.stats

    def residual_norm(self) -> float:
        """L2 norm of what this rank has not sent yet."""
        return self._exchange.state.residual_norm()

    def count_bytes(self, sent: int) -> None:
        """Add bytes that were handed to a collective beside the exchange to this step's statistics."""
        self._extra_bytes += sent

    @property
    def exchange(self) -> Exchange:
        """The exchange that is in use now."""
        return self._exchange

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: see :meth:`dgc.core.exchange.exchange.Exchange.state_dict`."""
        return {**self._exchange.state_dict(), "sparse_gradients": self._sparse.names}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state of this rank.

        Raises:
            LayoutError: it belongs to another model, rank or number of ranks.
        """
        self.abandon()
        sparse = self._sparse.indices_of(set(saved.get("sparse_gradients", ())))
        if sparse != self._sparse.found:
            self._exclude(sparse)
        self._sparse.settled = bool(sparse)
        self._exchange.load_state_dict(saved)
        self._drop_pending()
        self.steps.saved.compressor_loaded()

    def discard_step(self) -> bool:
        """Take the latest step back; see :meth:`dgc.adapter.compressor.CompressorBase.discard_step`."""
        return self._last.discard()

    def reset(self) -> None:
        """Forget residuals, momentum, the step and the statistics."""
        self.abandon()
        self._exchange.reset()
        self._drop_pending()

    def abandon(self) -> None:
        """Leave a step behind that an exception or an error ended; call it on all ranks."""
        self._exchange.abandon()
        self._results.clear()
        self._tensors.release()
        self._opened = False

    def close(self) -> None:
        """End the communication thread and the transport."""
        self.steps.end()
        _close_all(self._exchanges, self.transport)

    # -- inside --------------------------------------------------------------------------------------------------

    def _new_exchange(self) -> Exchange:
        members = self._sparse.others
        self._places = {i: place for place, i in enumerate(members)}
        layout = make_layout([describe(self.names[i], self.parameters[i]) for i in members], self._config)
        return Exchange(layout, self._config, self.transport, self._tensors.kernels, loss_scale=self._loss_scale)

    def _describe(self) -> dict[str, str]:
        """Each parameter's shape, type and optimizer options in words, for the ranks to compare."""
        hyper = self.adoption.hyper
        options = zip(hyper.momentum, hyper.nesterov, hyper.weight_decay, strict=True)
        return {
            name: f"{text} momentum={m} nesterov={n} weight_decay={w}"
            for (name, text), (m, n, w) in zip(self._exchange.layout.describe().items(), options, strict=True)
        }

    def _drop_pending(self) -> None:
        self._leave_failure()
        # The ranks may have met the failure before or after they asked each other.
        self.steps.saved.forget()
        self._replicas_compared = self._results_compared = False

    def _leave_failure(self) -> None:
        self._results.clear()
        self._error = None
        self._untold = self._opened = False

    def _begin(self, index: int) -> None:
        error = self._open_step(index)
        if error is not None:
            self._raise_on_all_ranks(error)

    def _open_step(self, index: int | None = None) -> DGCError | None:
        """Do what every rank does before its first gradient of a step; within a step, nothing.

        Args:
            index: the parameter whose gradient it is.

        Returns:
            What this rank has to tell the others in this step, if it cannot take part.

        Raises:
            DGCError: an earlier step failed.
        """
        error: DGCError | None = None
        if self._untold:
            # The others do not know yet, and begin this step.
            error = self._error
            self._leave_failure()
        if self._error is not None:
            raise self._error
        if self._opened:
            return None
        owner = self.steps.owner
        carried = self._last.next_begins(index, averages_first_pass(owner))
        if self.on_step_begin is not None:
            self.on_step_begin()
        self._opened = True
        # Whether a step was applied is known of an optimizer alone.
        self._exchange.unapplied.keeps_sent = owner is not None
        change = self.steps.saved.change(self.transport)
        try:
            if owner is not None:
                self.adoption.read(owner)
                self._take_over_state(owner, change)
                if any(self.adoption.hyper.momentum) or any(self.adoption.hyper.weight_decay):
                    refuse_velocity(carried)
        except ConfigError as refused:
            error = error or refused
        hyper, members = self.adoption.hyper, self._sparse.others
        self._exchange.hyper = Hyper(
            [hyper.momentum[i] for i in members],
            [hyper.nesterov[i] for i in members],
            [hyper.weight_decay[i] for i in members],
            self.learning_rates or learning_rates_of(owner),
            change.restored,
        )
        return error

    def _take_over_state(self, owner: torch.optim.Optimizer, change: Change) -> None:
        """Momentum that was loaded becomes u, and what belongs to the run that was left is forgotten."""
        state = self._exchange.state
        steps = state.step
        if change.restored:
            self._exchange.unapplied.settle()
            state.reset()
            state.step = steps  # the schedule goes on
        absorbed = self.adoption.absorb(owner, zeros=change.restored)
        if change.restored and self.transport.rank == 0:
            momentum = self.adoption.active and any(self.adoption.hyper.momentum)
            self.steps.saved.warn_of_loss(steps, absorbed or not momentum)
        if change.restored or change.broadcast:
            self._replicas_compared = False

    def _conclude(self) -> None:
        """What is left to do when the exchange has finished a step; collective after the first one."""
        self._opened = False
        self._exchange.stats.add_sent(self._extra_bytes)
        self._extra_bytes = 0
        for result in self._results.values():
            result.deliver()
        submitted = set(self._results)
        self._results.clear()
        if not self._sparse.settled:
            found = self._sparse.settle(self.transport, submitted)
            if found:
                self._exclude(found)
        if not self._replicas_compared:
            self._compare_replicas()
        self._last.concluded()

    def _watch_peers(self) -> None:
        """While the others keep this rank waiting, look whether one of them will never come."""
        if self.check_peers is None:
            return
        while not self._exchange.wait(_PATIENCE):
            self.check_peers()

    def _absorb(self, index: int, buffer: torch.Tensor) -> None:
        """A momentum_buffer of a dense run becomes u."""
        if index in self._sparse:
            return
        self._exchange.state.set_momentum_buffer(self._places[index], as_array(buffer))

    def _fill_in_sparse(self) -> list[torch.Tensor]:
        """Submit a zero for every parameter that got a sparse gradient.

        Returns:
            The zeros, which must stay until the step is over.
        """
        zeros = []
        for index, zero in self._sparse.without_result(self._results):
            self.require_own_momentum(index)
            zeros.append(zero)
            place, array = self._tensors.result(zero), self._tensors.array(zero)
            self._exchange.submit(self._places[index], array, place.array, array, place.limit, self._tensors.ready())
        return zeros

    def require_own_momentum(self, index: int) -> None:
        """Refuse a sparse gradient whose momentum was adopted: nobody would apply it.

        Raises:
            ConfigError: on every rank.
        """
        if self.adoption.took_from(index):
            self.fail(
                ConfigError(
                    f"{self.names[index]!r} has sparse gradients, which travel Horovod's own way, but momentum or "
                    "weight decay of its group was taken into the compressor; put it in a parameter group of its own "
                    "with momentum 0 and weight_decay 0"
                ),
                index,
            )

    def _compare_replicas(self) -> None:
        """After the first exchange, and the first after a state was loaded; before the update."""
        self._replicas_compared = True
        require_replicas(
            self.transport,
            {n: samples(p) for n, p in zip(self.names, self.parameters, strict=True)},
            "before the first step, and after loading a checkpoint on one rank, call "
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0), in which some optimizers move parameters, and then "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
        )

    def _exclude(self, sparse: set[int]) -> None:
        """Rebuild the exchange without the parameters that have sparse gradients, keeping all other state."""
        before, stats = self._exchange, self._exchange.stats
        states = [before.state.to_dict()]
        if before.unapplied.take_back():
            states.insert(0, before.state.to_dict())
        self._sparse.found = sparse
        before.close()
        self._exchange = self._new_exchange()
        self._exchanges[:] = [self._exchange]
        kept = {self.names[i] for i in self._sparse.others}
        for place, state in enumerate(states):
            state["parameters"] = {n: s for n, s in state["parameters"].items() if n in kept}
            if len(state["parameters"]) == len(kept):
                if place:
                    self._exchange.unapplied.remember()
                self._exchange.state.load(state)
        self._exchange.stats = stats


def _close_all(exchanges: list[Exchange], transport: Transport) -> None:
    """End the threads; the transport is left alone when one of them still waits in it for a rank that is gone."""
    if all([exchange.close() for exchange in exchanges]):
        transport.close()


def _loss_scale(value: Any) -> float | Callable[[], float]:
    """A float, a callable, or anything with ``get_scale()`` (a GradScaler)."""
    get_scale = getattr(value, "get_scale", None)
    return as_loss_scale(value, "GradScaler") if get_scale is None else get_scale
