"""One model's parameters on one rank, bound to an exchange of the core.

Every torch tensor becomes an array here, and every parameter has one index: its place among those that are exchanged.
What hands over gradients is a :class:`~dgc.torch.step.StepWatch`: of dgc's optimizer, Horovod's, or DDP's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import numpy as np
import torch

from dgc.adapter.agreement import require_replicas
from dgc.adapter.engine import EngineBase
from dgc.adapter.warm_up import compiled
from dgc.core.collectives import Transport, gather_values
from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders import runs_on_devices
from dgc.core.exchange.exchange import Exchange, LossScale
from dgc.core.exchange.records import StepContext, StepOptions
from dgc.core.layout import Layout, make_layout
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.adoption import Adoption
from dgc.torch.saved_state import Change
from dgc.torch.sparse_updates import SparseUpdates
from dgc.torch.step import Results, StepWatch, learning_rates_of, refusal_of_results
from dgc.torch.tensors import Places, Result, describe, fingerprint, local, samples, tensors_for

Named = Sequence[tuple[str, torch.Tensor]]


class Engine(EngineBase):
    """Parameters, their optimizer's adopted options, and the exchange. Construction is collective.

    Attributes:
        parameters: the compressed tensors in registration order.
        watch: the front end, which follows the steps of that optimizer.
        results: of the latest step.
        updates: whether they are applied as entries.
        decays_by_sign: indices of parameters whose decay is that of their signs (L1).
        excluded: indices of parameters that the option ``exclude`` names: they are sent dense.
        is_scaled: whether the scale of a GradScaler is known.
        left_alone: parameters of which no rank had a gradient in the latest step: DDP's find_unused_parameters leaves
            them as they are, and so does this package.
        joins: flags of :class:`~dgc.core.message.Flags` while this rank takes part without data.
        on_step_begin: called before the first gradient of each step is handed over, if set.
    """

    what = "parameters"
    advice = "Build the same model and optimizer on every rank; what one rank loads, load after wrapping and broadcast."
    adoption: Adoption
    exchange: Exchange

    def __init__(
        self,
        named: Named | Callable[[], Named],
        config: DGCConfig,
        transport: Transport,
        *,
        optimizer: torch.optim.Optimizer | None,
        loss_scale: LossScale = 1.0,
    ) -> None:
        super().__init__(config, transport)
        self.names = []
        self.parameters: list[torch.Tensor] = []
        self.on_step_begin: Callable[[], None] | None = None
        self.left_alone: set[int] = set()
        self.joins = 0
        self._options: StepOptions | None = None  # of the step that has begun, until its first gradient is there
        self._pending: dict[int, Result | None] = {}  # of this step's gradients; None where nothing is to be copied
        self._replicas_compared = self._results_compared = False
        self.error: DGCError | None = None
        self.decays_by_sign: set[int] = set()
        self.is_scaled = callable(loss_scale) or loss_scale != 1.0
        self._untold = self._opened = False  # whether others will hear of the error; know that this step has begun

        def build() -> Layout:
            pairs = named() if callable(named) else named
            self.names, self.parameters = [n for n, _ in pairs], [p for _, p in pairs]
            self._memory = Places(self.names, self.parameters)
            self._loss_scale = loss_scale
            host_only = None if runs_on_devices(config) else config.algorithm
            self._tensors = compiled(
                config, lambda: tensors_for(self.parameters, host_only), lambda tensors: tensors.kernels
            )
            self._open_exchange()
            self.adoption = Adoption(self.parameters, self.names, optimizer, config, self.exchange)
            return self.exchange.layout

        self._agree_on_options()
        self._agree_on_tensors(build)
        self.results = Results(self.parameters, self._exchanges)
        self.excluded = {i for i, n in enumerate(self.names) if any(fnmatchcase(n, p) for p in config.exclude)}
        self.updates = SparseUpdates(self.parameters, config.sparse_updates, self.layout.sparse_numel > 0)
        self.watch = StepWatch(self)

    def follow(self, watch: StepWatch) -> None:
        """Let a front end hand over gradients and follow the optimizer's steps."""
        self.watch.end()
        watch.saved.take_over(self.watch.saved)
        self.watch = watch

    def begin(self, index: int) -> None:
        """Open a step with the gradient of parameter ``index``, which is handed over later."""
        if (failed := self._open_step(index)) is not None:
            self.fail(failed)

    def submit(self, index: int, gradient: torch.Tensor, *, absent: bool = False) -> torch.Tensor:
        """Hand over a gradient of the parameter's shape, or zeros in the place of one that is ``absent`` on this rank.

        Returns:
            A tensor, shard of a sharded one, that holds the outcome after :meth:`finish`; mostly ``gradient`` itself.
        """
        if not self._opened:
            self.begin(index)
        try:
            ready = self._tensors.ready()
        except ConfigError as refused:
            self.fail(refused)
        if gradient.is_sparse:
            self.refuse_sparse(index)
        result = self._memory.place(index, gradient := local(gradient))
        if isinstance(result, LayoutError):
            self.fail(result, index)
        place = self._tensors.result(result)
        self._pending[index] = None if place.is_view else place
        values = place.array if place.is_view and result is gradient else self._tensors.array(gradient)
        try:
            decay = None
            if self.adoption.hyper.weight_decay[index]:
                decayed = local(self.parameters[index])
                decay = self._tensors.array(decayed.sign() if index in self.decays_by_sign else decayed)
            if self._options is not None:
                options, self._options = self._options, None
                self.exchange.begin(options)
            self.exchange.submit(index, values, place.array, decay, place.limit, ready, absent=absent)
        except DGCError as error:
            self._fail_with(error)
            raise
        return result

    def finish(self) -> None:
        """Wait for all results of the step. Calling it again before the next step does nothing."""
        if self.error is not None:
            raise self.error
        if not self.exchange.latest.under_way:
            self._opened = False
            return
        try:
            for index in self.exchange.missing():  # Horovod keeps a sparse gradient to itself
                if (gradient := self.parameters[index].grad) is not None and gradient.is_sparse:
                    self.refuse_sparse(index)
            self.exchange.finish()
            self.left_alone = self.exchange.left_alone
            if self.updates.concluded(self.watch.owner, self.watch.in_step):
                self.updates.deferred = self.exchange.deferred()
            else:
                self.exchange.write_deferred()
        except DGCError as error:
            self.error, self._opened = error, False
            raise
        finally:
            self.watch.plain_step = False
            # Until here the kernels may write to memory that they were given.
            self._tensors.release()
        self._conclude()

    @property
    def how_updated(self) -> str:  # noqa: D102
        reason = self.updates.reason
        return "sparse" if reason is None else f"dense: {reason}"

    def fail(self, error: DGCError, index: int | None = None) -> NoReturn:
        """Raise ``error``, or an earlier one, here and on all ranks: see ``Exchange.fail``."""
        error = self._open_step(index) or error
        try:
            self.exchange.fail(error, index)
        except DGCError as raised:
            self._fail_with(raised)
            raise

    def _fail_with(self, error: DGCError) -> None:
        """Remember what the exchange has raised, in a step that is over with it."""
        self.error, self._opened = error, False
        self._tensors.release()
        self._untold = self.exchange.latest.failure_pending
        if self._untold:
            self.exchange.write_deferred()
            self._conclude()  # as the others do

    def is_done(self) -> bool:
        """Whether another ``synchronize()`` is to hand back the latest step's results; the ranks compare them once.

        They are there and were not cleared, and no other step has begun.
        """
        if self.error is not None or self._opened or self.exchange.in_step or not self.results.stand:
            return False
        if not self._results_compared:
            self._results_compared = True
            # A gradient that was taken out of the step counts as 0, which another rank may have put there already.
            absent = [p.grad is None or p.grad.is_sparse for p in self.parameters]
            gradients = [torch.zeros_like(p) if a else p.grad for p, a in zip(self.parameters, absent, strict=True)]
            require_replicas(
                self.transport,
                {n: fingerprint(g) for n, g in zip(self.names, gradients, strict=True)},
                "their gradients were changed in different ways between synchronize() and another synchronize() or "
                "step(), which averages nothing again: make the same change on every rank",
            )
        return True

    def _extra_state(self) -> dict[str, Any]:
        return {}

    def _take_state(self, saved: dict[str, Any]) -> None:
        self.exchange.load_state_dict(saved)
        self._clear()
        self.watch.saved.compressor_loaded()

    def abandon(self) -> bool:  # noqa: D102
        through = super().abandon()
        self._pending.clear()
        self._tensors.release()
        self._opened = False
        try:
            self.exchange.latest.require_usable()
        except DGCError as error:  # until reset() or load_state_dict() has succeeded
            self.error = self.error or error
        return through

    def close(self, keep_transport: bool = False) -> None:  # noqa: D102
        self.watch.end()
        super().close(keep_transport)

    def _open_exchange(self) -> None:
        kernels = self._tensors.kernels
        layout = make_layout([describe(n, p) for n, p in zip(self.names, self.parameters, strict=True)], self._config)
        self.exchange = Exchange(layout, self._config, self.between, kernels, loss_scale=self._loss_scale)
        itself = weakref.ref(self)  # the exchange does not keep this engine alive

        def meet_joined(context: StepContext) -> None:
            if (engine := itself()) is not None:
                watch, adoption = engine.watch, engine.adoption
                assert watch.owner is not None, "it has begun the step"
                at_once = watch.drives and watch.in_step
                engine.follows = share_options(engine.between, context, adoption, watch.owner, at_once)

        self.exchange.on_joined = meet_joined
        self._exchanges[:] = [self.exchange]

    def _clear(self) -> None:
        self._pending.clear()
        self.error, self._untold, self._opened = None, False, False
        self.watch.saved.forget()  # the ranks may have met the failure before or after they asked each other
        self._replicas_compared = self._results_compared = False

    def _open_step(self, index: int | None = None) -> DGCError | None:
        """Prepare for the first gradient of a step; returns the error for which this rank cannot take part in it."""
        error: DGCError | None = None
        if self._untold:
            error = self.error  # the other ranks begin this step without it
            self._pending.clear()
            self.error, self._untold = None, False
        if self.error is not None:
            raise self.error
        if self._opened:
            return None
        watch, results, updates = self.watch, self.results, self.updates
        owner, idle = watch.owner, watch.drives and not watch.begun
        stepping, watch.plain_step = idle and watch.plain_step, False
        undecided, unwritten = results.undecided, updates.applied
        left = results.next_begins(None if idle else index)
        if self.on_step_begin is not None:
            self.on_step_begin()
        self._opened = True
        self._memory.begin()
        defers = updates.begin(owner, results.kept)
        change = watch.saved.change(self.transport, owner)
        try:
            if owner is not None:
                self.adoption.read(owner, self.exchange.state.step, anew=any(change))
                self._take_over_state(owner, change)
                if left and (undecided or stepping):
                    velocity = self.adoption.has_velocity
                    error = error or refusal_of_results(undecided=undecided, velocity=velocity, unwritten=unwritten)
        except ConfigError as refused:
            error = error or refused
        rates = learning_rates_of(owner)
        hyper = self.adoption.hyper.chosen(range(len(self.names)), rates, change.restored)
        self._options = StepOptions(hyper, watch.holds, defers, self.joins)
        return error

    def _take_over_state(self, owner: torch.optim.Optimizer, change: Change) -> None:
        """Momentum that was loaded becomes u, and what belongs to the run that was left is forgotten."""
        state, steps = self.exchange.state, self.exchange.state.step
        if change.restored:
            state.reset()
            state.step = steps  # the schedule goes on
        absorbed = self.adoption.absorb(owner, restored=change.restored)
        if (change.restored or change.stepped) and self.transport.rank == 0:
            momentum = self.adoption.active and any(self.adoption.hyper.momentum)
            warms_up = bool(self._config.rampup_begin_step) or len(self._config.sparsity) > 1
            self.watch.saved.warn_of_loss(steps, change, absorbed or not momentum, warms_up)
        self._replicas_compared &= not (change.restored or change.broadcast)

    def _conclude(self) -> None:
        """What is left to do when the exchange has finished a step; collective after the first one."""
        self._opened = False
        for result in filter(None, self._pending.values()):
            result.deliver()
        self._pending.clear()
        if not self._replicas_compared:
            self._replicas_compared = True
            require_replicas(
                self.transport,
                {n: samples(p) for n, p in zip(self.names, self.parameters, strict=True)},
                "before the first step call dgc.torch.broadcast_parameters(model.state_dict()) on all ranks, and load "
                "a checkpoint on all of them; with Horovod call hvd.broadcast_optimizer_state(optimizer, root_rank=0), "
                "in which some optimizers move parameters, and then hvd.broadcast_parameters(model.state_dict(), "
                "root_rank=0)",
            )
        self._memory.end()
        self.results.written()
        if self.observers:
            self._tell_observers()

    def refuse_sparse(self, index: int) -> NoReturn:
        """Refuse a sparse gradient, on every rank."""
        wrong = (
            f"{self.names[index]!r} has sparse gradients, which are not compressed: give sparse_as_dense=True to "
            "dgc.torch.DistributedOptimizer, name the parameter in exclude= of the compressor (it is then sent dense), "
            "or build the embedding with sparse=False"
        )
        self.fail(ConfigError(wrong), index)


def share_options(
    transport: Transport,
    context: StepContext,
    adoption: Adoption,
    optimizer: torch.optim.Optimizer,
    updates: bool,
) -> bool:
    """Give ranks that have joined the options of one that trains. Collective."""
    hidden = adoption.hides  # Horovod's optimizer exchanges within step()
    adoption.show()
    rows = gather_values(transport, [updates, option_values(optimizer)])
    trains, options = rows[min(set(range(transport.size)) - set(context.joined))]
    if transport.rank in context.joined:
        set_option_values(optimizer, options)
        adoption.read(optimizer, context.step)
        context.hyper = adoption.hyper.chosen(range(len(adoption.hyper.momentum)))
    if hidden:
        adoption.hide(optimizer)
    return bool(trains)


def option_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The numbers among all groups' options for JSON, in a fixed order; None in the place of anything else."""
    return [_number(group[name]) for group in optimizer.param_groups for name in optimizer.defaults]


def set_option_values(optimizer: torch.optim.Optimizer, values: Sequence[Any]) -> None:
    """Overwrite the numbers among all groups' options by what :func:`option_values` returned on another rank."""
    left = iter(values)
    for group in optimizer.param_groups:
        for name in optimizer.defaults:
            group[name] = _overwritten(group[name], next(left))


def _number(value: object) -> Any:
    if isinstance(value, tuple):
        return list(map(_number, value))
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.floating):
        return float(value)
    return value if isinstance(value, (int, float)) else None


def _overwritten(own: object, came: Any) -> Any:
    if isinstance(own, tuple):
        return tuple(map(_overwritten, own, came))
    if isinstance(own, torch.Tensor):
        return own.copy_(torch.as_tensor(came))
    return own if came is None else came
