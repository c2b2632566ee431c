"""Exchange the gradients of one model on one rank: collect gradients, exchange, deliver results.

One exchange is one step. When :meth:`Engine.finish` returns, either all ranks have committed it or all ranks have
refused it. Every torch tensor becomes an array here, and every parameter has one index: its place among those that are
exchanged. A :class:`~dgc.torch.front_end.FrontEnd` says when gradients are ready and when results are needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from typing_extensions import override

from dgc.adapter.agreement import require_agreement, require_replicas
from dgc.adapter.checks import warn_once
from dgc.adapter.engine import EngineBase
from dgc.adapter.warm_up import compiled
from dgc.core.collectives import Transport
from dgc.core.config import DGCConfig
from dgc.core.exchange.encoders import kernels_select
from dgc.core.exchange.exchange import Exchange, LossScale
from dgc.core.exchange.step import Step, StepOptions
from dgc.core.layout import Layout, make_layout
from dgc.errors import ConfigError, DGCError, LayoutError, unraised
from dgc.torch.adoption import Adoption
from dgc.torch.front_end import FrontEnd, Waiting, learning_rates_of
from dgc.torch.joined_options import constant_options, share_options
from dgc.torch.saved_state import Change, SavedState
from dgc.torch.tensors import Places, Result, describe, fingerprint, local, samples, sum_of_bits, tensors_for
from dgc.torch.untraced import weakly

Named = Sequence[tuple[str, torch.Tensor]]

# These texts are short, because the small message that tells them to other ranks holds about 200 characters.
_VELOCITY = (
    "call optimizer.zero_grad() after each step(): .grad still holds results with the compressor's momentum or decay. "
    "To add up gradients use backward_passes_per_step, no_sync() (DDP), or momentum=0 in the compressor"
)
_UNSENT = (
    "a state was loaded into the optimizer, but none into the compressor: what the saved run had not sent yet is "
    "dropped; save and load compression.state_dict(), too, as docs/pytorch.md shows"
)
_DROPPED = (
    "gradients were cleared after their exchange, and no step() has used them: with classic error feedback they stay "
    "in momentum and residual, and move the weights later. Compute gradients that must not be applied inside no_sync() "
    "(DDP), or by torch.autograd.grad() (dgc's optimizer); or give error_feedback='step-ahead'"
)
_LOOKED_AT = 2**20  # the most elements to check, smallest tensors first: uncleared results are in these, too


class Engine(EngineBase):
    """Holds the parameters, their optimizer's adopted options and the exchange. Construction is collective.

    Attributes:
        parameters: the compressed tensors in registration order.
        front_end: submits gradients, and follows the steps of the optimizer.
        saved: notices what is loaded into the optimizer between two steps.
        decay_of: called with the index and the values of a parameter that decays; returns the values that weight decay
            multiplies. By default these are the parameter's own. It may be replaced, for instance by a decay by sign.
        excluded: indices of parameters that the option ``exclude`` names. They are sent dense.
        by_scaler: whether a GradScaler of unknown scale steps the optimizer; None before the first step.
        left_alone: parameters for which no rank had a gradient in the latest step. They do not change, as with DDP's
            find_unused_parameters.
        joins: the :class:`~dgc.core.message.Flags` that this rank's messages carry while it has no data; otherwise 0.
        on_step_begin: called before the first gradient of each step is submitted, if set.
        error: the error that ended the latest step on this rank; None if the step was committed or refused.
    """

    what = "parameters"
    advice = "Build the same model and optimizer on every rank; what one rank loads, load after wrapping and broadcast."
    adoption: Adoption
    exchange: Exchange
    keeps_sparse = True  # a sparse .grad stays sparse, even if a dense copy of it is exchanged

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
        self._pending: dict[int, Result | None] = {}  # results of this step's gradients; None: there is nothing to copy
        self._replicas_compared = False
        self._delivered = False  # whether .grad may hold the latest step's results
        self.error: DGCError | None = None
        self.decay_of: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, values: values
        self.by_scaler: bool | None = None if loss_scale == 1.0 else False

        def build() -> Layout:
            pairs = named() if callable(named) else named
            self.names, self.parameters = [n for n, _ in pairs], [p for _, p in pairs]
            self._memory = Places(self.names, self.parameters)
            host_only = None if kernels_select(config) else config.algorithm
            self._tensors = compiled(
                config, lambda: tensors_for(self.parameters, host_only), lambda tensors: tensors.kernels
            )
            layout = make_layout([describe(n, p) for n, p in pairs], config)
            self.exchange = Exchange(layout, config, self.between, self._tensors.kernels, loss_scale=loss_scale)
            self.exchange.on_joined = weakly(self._share_options)
            self._exchange = self.exchange
            self.adoption = Adoption(self.parameters, self.names, optimizer, config, self.exchange)
            return layout

        self._agree_on_options()
        self._agree_on_tensors(build)
        self._by_size = sorted(range(len(self.parameters)), key=lambda i: self.parameters[i].numel())
        self.excluded = {i for i, n in enumerate(self.names) if any(fnmatchcase(n, p) for p in config.exclude)}
        self.front_end = FrontEnd(self)
        self.saved = SavedState(self.adoption, self.exchange.state, lambda: self.front_end.begin_anew())

    def follow(self, front_end: FrontEnd) -> None:
        """Let a front end submit gradients and follow the optimizer's steps."""
        self.front_end.end()
        self.front_end = front_end

    # -- one step: collect, exchange, deliver ------------------------------------------------------------------------

    def submit(self, index: int, gradient: torch.Tensor, *, absent: bool = False) -> torch.Tensor:
        """Submit a gradient of the parameter's shape, or zeros if it is ``absent`` on this rank.

        Returns:
            A tensor that holds the result after :meth:`finish`, mostly ``gradient`` itself. For a sharded gradient,
            this rank's shard.
        """
        self._open()
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
                decay = self._tensors.array(self.decay_of(index, local(self.parameters[index])))
            self.exchange.submit(index, values, place.array, decay, place.limit, ready, absent=absent)
        except DGCError as error:
            self._fail_with(error)
            raise
        return result

    def finish(self) -> None:
        """Wait for all results of the step, and deliver them. Calling it again before the next step does nothing."""
        if self.error is not None:
            raise unraised(self.error)
        if not self.exchange.in_step:
            return
        try:
            for index in self.exchange.missing():  # Horovod does not hand over a sparse gradient
                if (gradient := self.parameters[index].grad) is not None and gradient.is_sparse:
                    self.refuse_sparse(index)
            self.exchange.finish()
            self.left_alone = self.exchange.left_alone
        except DGCError as error:
            self._keep(error)
            raise
        finally:
            # Until this call the kernels may still write to the memory that they were given.
            self._tensors.release()
        self._deliver()

    def fail(self, error: DGCError, index: int | None = None) -> NoReturn:
        """Raise ``error``, or an earlier one, here and on all ranks: see ``Exchange.fail``."""
        self._open()
        try:
            self.exchange.fail(error, index)
        except DGCError as raised:
            self._fail_with(raised)
            raise

    @override
    def abandon(self) -> bool:
        through = super().abandon()
        self._pending.clear()
        self._tensors.release()
        try:
            self.exchange.latest.require_usable()
        except DGCError as error:  # every step is an error until reset() or load_state_dict()
            self.error = self.error or unraised(error)
        if self.front_end.waiting is Waiting.GRADIENTS:
            self.front_end.give_up(through)
        return through

    def _open(self) -> None:
        """Begin a step, unless one is open. An error of this rank ends it at once, on all ranks."""
        if self.exchange.latest.step is not None and self.error is None:
            return
        error: DGCError | None = None
        if self.exchange.latest.failure_pending:
            error, self.error = self.error, None  # the other ranks do not know of the error, and begin this step
        if self.error is not None:
            raise unraised(self.error)
        owner = self.front_end.owner
        if self.on_step_begin is not None:
            self.on_step_begin()
        self._delivered = False
        self._memory.begin()
        change = self.saved.change(self.transport)
        if owner is not None:
            with self.adoption.shown(owner):  # Horovod's optimizer exchanges within step()
                try:
                    self.adoption.read(owner, self.exchange.state.step, anew=any(change))
                    self._take_over_state(owner, change)
                except ConfigError as refused:
                    error = error or refused
        self._hyper = self.adoption.hyper.chosen(range(len(self.names)), learning_rates_of(owner), change.restored)
        self.exchange.begin(StepOptions(self._hyper, holds=self.front_end.holds, joins=self.joins))
        if error is not None:
            self.fail(error)

    def _take_over_state(self, owner: torch.optim.Optimizer, change: Change) -> None:
        """Turn loaded momentum into u, and forget what belongs to the run before the load."""
        if change.restored:
            state = self.exchange.state
            step = state.step
            state.reset()
            state.step = step  # the schedule continues
        self.adoption.absorb(owner, restored=change.restored, kept=change.kept)
        if change.unsent and self.transport.rank == 0:
            warnings.warn(_UNSENT, RuntimeWarning, stacklevel=2)
        self._replicas_compared &= not (change.restored or change.broadcast)

    def _deliver(self) -> None:
        """Bring the results to ``.grad``. In the first step also compare the ranks' parameters, which is collective."""
        self._delivered = True
        for result in filter(None, self._pending.values()):
            result.deliver()
        self._pending.clear()
        if not self._replicas_compared:
            self._replicas_compared = True
            require_replicas(
                self.transport,
                {n: samples(p) for n, p in zip(self.names, self.parameters, strict=True)},
                "before the first step call dgc.torch.broadcast_parameters(model.state_dict()) on all ranks, and load "
                "a checkpoint on all of them; with Horovod call hvd.broadcast_optimizer_state(optimizer, root_rank=0) "
                "and, after it, hvd.broadcast_parameters(model.state_dict(), root_rank=0). In the other order weight "
                "decay moves the parameters of ranks without a state: Horovod steps their plain optimizers",
                sums=list(map(sum_of_bits, self.parameters)),
            )
            self._require_equal_options()
        self._after_step()

    def _require_equal_options(self) -> None:
        owner = self.front_end.owner
        if owner is not None:
            with self.adoption.shown(owner):
                advice = "Give every rank the same options, or load the optimizer's state on all ranks."
                require_agreement(self.transport, constant_options(owner), "the optimizer's options", advice=advice)

    def _fail_with(self, error: DGCError) -> None:
        """Store an error that the exchange has raised and that ends the step."""
        self._tensors.release()
        if self.exchange.latest.failure_pending:  # the step has ended for the other ranks, which do not know of it
            self.error = unraised(error)
            self._deliver()  # as the others do
        self._keep(error)

    def _keep(self, error: DGCError) -> None:
        """Store an error. If options differ between ranks, raise one that names the option; this is collective."""
        self.error = unraised(error)
        try:
            self._name_difference(error, self._hyper, "lr of group {}")
        except ConfigError as named:
            self.error = unraised(named)
            raise

    def _share_options(self, step: Step) -> None:
        owner = self.front_end.owner
        assert owner is not None, "it has begun the step"
        self.follows = share_options(self.between, step, self.adoption, owner, self.front_end.update_follows)

    # -- what .grad holds between two steps ----------------------------------------------------------------------------

    def results_cleared(self) -> None:
        """Note that the script has cleared ``.grad``."""
        self._delivered = False

    def warn_of_dropped(self, index: int | None = None) -> None:
        """Warn on rank 0 if the script has cleared results that no ``step()`` has used, and a part of them is kept.

        ``index`` is that of a parameter to whose ``.grad`` a backward pass has added since.
        """
        if self.transport.rank or self.exchange.refused or self._uncleared(index) is not None:
            return
        if self.adoption.has_velocity or self.residual_norm():
            warn_once(_DROPPED)

    def refuse_results(self, index: int | None = None) -> None:
        """Refuse, on all ranks, to exchange results of the latest step as gradients.

        Call it with the index of a step's first gradient when that arrives, or with None if the step begins without a
        gradient. Results that contain neither momentum nor decay are exchanged like gradients, as in dense training.
        """
        if not (self._delivered and self.adoption.has_velocity):
            return
        self._delivered = False
        if (uncleared := self._uncleared(index)) is not None:
            self.fail(ConfigError(_VELOCITY), uncleared)

    def _uncleared(self, index: int | None) -> int | None:
        """Return a parameter of the owner, but not ``index``, whose ``.grad`` is not 0; None if none was found."""
        seen, owner = 0, self.front_end.owner
        stepped = set() if owner is None else {id(p) for group in owner.param_groups for p in group["params"]}
        for i in self._by_size:
            p = self.parameters[i]
            if i == index or (gradient := p.grad) is None or gradient.is_sparse or id(p) not in stepped:
                continue
            if seen >= _LOOKED_AT:
                break
            seen += gradient.numel()
            if bool(local(gradient).any()):
                return i
        return None

    def hands_back(self) -> bool:
        """Return whether another ``synchronize()`` returns the latest results. If so, the ranks compare them."""
        if self.error is not None or self.exchange.in_step:
            return False
        absent = [p.grad is None or p.grad.is_sparse for p in self.parameters]
        gradients = [torch.zeros_like(p) if a else p.grad for p, a in zip(self.parameters, absent, strict=True)]
        require_replicas(
            self.transport,
            {n: fingerprint(g) for n, g in zip(self.names, gradients, strict=True)},
            "their gradients were changed in different ways between synchronize() and another synchronize() or "
            "step(), which averages nothing again: make the same change on every rank",
            tolerance=1e-5,  # different machines may round the same change differently
        )
        return True

    def refuse_sparse(self, index: int) -> NoReturn:
        """Refuse a sparse gradient, on every rank."""
        wrong = (
            f"{self.names[index]!r} has sparse gradients, which are not compressed: give sparse_as_dense=True to "
            "dgc.torch.DistributedOptimizer, name the parameter in exclude= of the compressor (it is then sent dense), "
            "or build the embedding with sparse=False"
        )
        self.fail(ConfigError(wrong), index)

    # -- state, ending -------------------------------------------------------------------------------------------------

    @override
    def _take_state(self, saved: Mapping[str, Any]) -> None:
        self.exchange.load_state_dict(saved)
        self._clear()
        self.saved.compressor_loaded()

    @override
    def _clear(self) -> None:
        self.error, self._delivered, self._replicas_compared = None, False, False
        self.saved.forget()  # some ranks may have failed before the collective in saved.change(), others after it

    @override
    def close(self, keep_transport: bool = False) -> None:
        if (owner := self.front_end.owner) is not None and self.is_open:
            self.saved.end(owner)
        self.front_end.end()
        super().close(keep_transport)
