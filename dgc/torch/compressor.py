"""The object behind ``compression=``: a Horovod ``Compressor`` that remembers what it has not sent yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dgc.adapter.compressor import CompressorBase
from dgc.adapter.horovod import check_stand_in
from dgc.core.config.checks import as_loss_scale
from dgc.core.exchange.exchange import LossScale
from dgc.core.transport import Transport
from dgc.errors import ConfigError, DGCError, LayoutError, StallError
from dgc.torch.engine.engine import Engine
from dgc.torch.engine.horovod.choice import make_transport
from dgc.torch.engine.horovod.held import StandIns
from dgc.torch.engine.horovod.horovod import HOROVOD, give_up_step, has_begun, is_averaged
from dgc.torch.engine.horovod.stand_in import StandIn
from dgc.torch.engine.step.owner import announce_owner, find_owner
from dgc.torch.engine.step.saved_state import require_own_options
from dgc.torch.engine.step.scaler import read_scale
from dgc.torch.engine.step.sparse_updates import obstacle_of_sgd
from dgc.torch.engine.step.untraced import leave_hooks_untraced, untraced

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class DGCCompressor(CompressorBase[Engine]):
    """A compressor (Deep Gradient Compression, unless another is named) for one model and one optimizer.

    Way A hands it to stock ``hvd.DistributedOptimizer(compression=...)``, which calls :meth:`compress` and
    :meth:`decompress`; way B (``dgc.torch.DistributedOptimizer``) binds it and drives its engine itself.
    With one process Horovod calls no compressor: nothing is adopted, and the optimizer keeps its momentum.
    """

    _horovod = HOROVOD
    _waits = True
    _deferred: DGCError | None = None
    _giving_up = False  # the other ranks' stand-ins of a failed step get theirs, and nothing else
    _last_found = 0
    _owner_checked = False

    def __init__(self, options: dict[str, Any], algorithm: str = "dgc", members: Any = None) -> None:
        super().__init__(options, algorithm, members)
        self._stand_ins = StandIns()

    def _read_loss_scale(self, value: Any) -> LossScale:
        """A number, a function, or anything with ``get_scale()`` (a GradScaler)."""
        get_scale = getattr(value, "get_scale", None)
        return as_loss_scale(value, "GradScaler") if get_scale is None else partial(read_scale, value)

    # -- binding -------------------------------------------------------------------------------------------------

    def bind(
        self,
        named_parameters: NamedParameters,
        optimizer: torch.optim.Optimizer | None = None,
        process_set: Any = None,
        given: torch.optim.Optimizer | None = None,
    ) -> None:
        """Attach to a model's parameters; collective over the process set.

        Args:
            named_parameters: (name, parameter) pairs, at least those of the optimizer.
            optimizer: whose parameters with ``requires_grad`` form the layout, and whose options are adopted.
            process_set: the Horovod process set of the exchange; None means the option's, or all ranks.
            given: the user's optimizer, where ``optimizer`` is what was made of it already.

        Raises:
            ConfigError: bound before, elastic Horovod, or a part of what is needed is missing.
            LayoutError: ranks disagree about the parameters.
        """
        if self._is_bound:
            raise ConfigError(
                "this compressor is already bound to a model; residuals cannot be shared: build one compressor for "
                "each model and optimizer"
            )
        named = list(named_parameters)
        leave_hooks_untraced()

        def open_engine(transport: Transport, members: Any) -> Engine:
            engine = Engine(
                lambda: _layout_of(named, optimizer, given),
                self.config,
                transport,
                optimizer=optimizer,
                loss_scale=self._loss_scale,
            )
            try:
                stand_in = StandIn(HOROVOD.module(), transport, members, engine.count_bytes)
            except BaseException:
                engine.close(keep_transport=True)
                raise
            engine.on_step_begin, engine.check_peers = stand_in.send, stand_in.check
            engine.updates.obstacle = obstacle_of_sgd(
                engine.parameters, engine.adoption.options, engine.steps.scale_is_known
            )
            engine.steps.owned_by = lambda stepping: getattr(stepping, "_compression", None) is self
            return engine

        self._bind(process_set, open_engine)
        if self._engine is not None and given is None and optimizer is not None:
            announce_owner(optimizer, self._engine.steps)

    def _make_transport(self, choice: Any, members: Any) -> Transport:
        return make_transport(choice, members)

    # -- Horovod's Compressor ------------------------------------------------------------------------------------

    @untraced
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start the exchange of a gradient; Horovod reduces a one-element stand-in in the meantime.

        Errors about the gradient are raised by :meth:`decompress`, on all ranks.

        Raises:
            ConfigError: ``op=Adasum``, or the compressor is not bound to a model.
        """
        engine = self._exchanging(
            "parameters: pass model.named_parameters() and optimizer=, or use dgc.torch.DistributedOptimizer, which "
            "binds them"
        )
        if engine is None:
            return tensor, None  # a process set of one rank: Horovod calls, but there is nobody to exchange with
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):  # which takes long to ask
            raise ConfigError("op=Adasum cannot be combined with gradient compression; use op=hvd.Average")
        if self._is_exchanged(engine):
            # synchronize() once more in the same step: the gradient is the step's result, clipped perhaps.
            engine.require_same_results()
            stand_in = self._stand_ins.take()
            engine.stats.add_sent(stand_in.nbytes)
            return stand_in, tensor
        result = tensor
        if self._deferred is None and not self._giving_up:
            try:
                result = self._submit(engine, tensor)
            except StallError:
                raise  # the others do not come: there is nobody to be told
            except DGCError as error:
                # Raised here, in a backward hook, it would leave the other ranks waiting for this one's stand-in.
                self._deferred = error
        stand_in = self._stand_ins.take()
        engine.count_bytes(stand_in.nbytes)
        return stand_in, result

    @untraced
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Wait for the exchange and return ``ctx``, mostly the gradient itself, which now holds the averaged result.

        Raises:
            ConfigError: the stand-in shows another op than the compressor was told of, or a joined rank.
            DGCError: this or another rank failed.
        """
        if ctx is None:
            return tensor
        assert self._engine is not None
        reduced = float(tensor)
        self._stand_ins.give_back(tensor, reduced)
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error
        check_stand_in(reduced, op=self.config.op, size=self._engine.transport.size)
        self._engine.finish()
        return ctx

    # -- state ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:  # noqa: D102
        with self._step_given_up():
            super().reset()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], resize: bool = False) -> None:  # noqa: D102
        with self._step_given_up():
            super().load_state_dict(state, resize)

    # -- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step_given_up(self) -> Iterator[None]:
        """After what is inside, a step that an error or an exception left half done is forgotten by Horovod, too."""
        yield
        self._deferred = None
        owner = self._engine.steps.owner if self._engine is not None else None
        if owner is not None and has_begun(owner):
            self._giving_up = True
            try:
                give_up_step(owner, owner._compression is self)
            finally:
                self._giving_up = False

    def _is_exchanged(self, engine: Engine) -> bool:
        owner = engine.steps.owner
        free = self._deferred is None and not self._giving_up
        return free and owner is not None and engine.is_done() and is_averaged(owner)

    def _submit(self, engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
        if not self._owner_checked:
            engine.steps.owner = find_owner(self)
            self._owner_checked = True
            self.require_same_set(getattr(engine.steps.owner, "process_set", self._members))
            _refuse_densified(engine)
        index = self._locate(engine, tensor)
        if index is None:
            engine.fail(
                LayoutError(
                    "Horovod passed a gradient that belongs to no parameter of this compressor: the optimizer has a "
                    "parameter that was not in named_parameters with requires_grad when the compressor was built, "
                    "two models share the compressor, or sparse_as_dense=True copied a sparse gradient"
                )
            )
        assert index is not None
        # The result goes where the gradient is: Horovod lets .grad have the result's memory in any case.
        return engine.submit(index, tensor)

    def _locate(self, engine: Engine, tensor: torch.Tensor) -> int | None:
        """Find the parameter whose ``.grad`` is this very tensor, beginning where the last one was found."""
        count = len(engine.parameters)
        start = self._last_found
        for offset in range(count):
            index = (start - offset) % count
            if engine.parameters[index].grad is tensor:
                self._last_found = index - 1
                return index
        return None


def _layout_of(
    named_parameters: NamedParameters,
    optimizer: torch.optim.Optimizer | None,
    given: torch.optim.Optimizer | None = None,
) -> list[tuple[str, torch.Tensor]]:
    require_own_options(given or optimizer)
    by_id: dict[int, tuple[str, torch.Tensor]] = {}
    for n, p in named_parameters:
        if p.requires_grad:
            by_id.setdefault(id(p), (n, p))  # a tied parameter counts once, under its first name
    named = list(by_id.values())
    if optimizer is None:
        return named
    owned = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    chosen = [(n, p) for n, p in named if id(p) in owned]
    missing = len(owned) - len({id(p) for _, p in chosen})
    if missing:
        raise LayoutError(
            f"{missing} parameters of the optimizer have no name; pass model.named_parameters() of all of them"
        )
    return chosen


def _refuse_densified(engine: Engine) -> None:
    if getattr(engine.steps.owner, "sparse_as_dense", False):
        engine.fail(
            ConfigError(
                "sparse_as_dense=True hides which parameter a gradient belongs to; use dgc.torch.DistributedOptimizer, "
                "or give the embedding dense gradients (sparse=False)"
            )
        )
