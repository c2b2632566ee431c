"""The object behind ``compression=``: a Horovod ``Compressor`` that remembers what it has not sent yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dgc.adapter.compressor import CompressorBase, check_stand_in
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch.engine import Engine
from dgc.torch.horovod import give_up_step, has_begun, import_horovod, is_averaged
from dgc.torch.owner import announce_owner, find_owner
from dgc.torch.saved_state import require_own_options
from dgc.torch.stand_in import StandIn
from dgc.torch.transports import make_transport

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class _Ops:
    """Horovod's reduce ops, looked up when they are needed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_horovod(initialized=False), name)


class DGCCompressor(CompressorBase):
    """A compressor (Deep Gradient Compression, unless another is named) for one model and one optimizer.

    Way A hands it to stock ``hvd.DistributedOptimizer(compression=...)``, which calls :meth:`compress` and
    :meth:`decompress`; way B (``dgc.torch.DistributedOptimizer``) binds it and drives its engine itself.
    With one process Horovod calls no compressor: nothing is adopted, and the optimizer keeps its momentum.
    """

    def __init__(self, options: dict[str, Any], algorithm: str = "dgc", members: Any = None) -> None:
        """Check the options; the parameters come with :meth:`bind`.

        Raises:
            TypeError: an option is unknown.
            ConfigError: an option is out of range.
        """
        super().__init__(options, _Ops(), algorithm, members)
        self._bound = False
        self._engine: Engine | None = None
        self._deferred: DGCError | None = None
        self._giving_up = False  # the other ranks' stand-ins of a failed step get theirs, and nothing else
        self._last_found = 0
        self._owner_checked = False

    # -- binding -------------------------------------------------------------------------------------------------

    def bind(
        self,
        named_parameters: NamedParameters,
        optimizer: torch.optim.Optimizer | None,
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
        if self._bound:
            raise ConfigError(
                "this compressor is already bound to a model; residuals cannot be shared: build one compressor for "
                "each model and optimizer"
            )
        hvd = import_horovod()
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise ConfigError("elastic Horovod is not supported yet; start the job with a fixed number of processes")
        chosen = self._adapter.get("process_set") or process_set or hvd.global_process_set
        if process_set is not None and chosen is not process_set:
            raise ConfigError("the compressor and the optimizer name different process sets; give it in one place")
        self._bound = True
        if not chosen.included() or chosen.size() == 1:
            return
        transport = make_transport(self._adapter.get("transport", "auto"), chosen)
        try:
            self._engine = Engine(
                lambda: _layout_of(named_parameters, optimizer, given),
                self.config,
                transport,
                optimizer=optimizer,
                loss_scale=self._adapter.get("loss_scale", 1.0),
            )
        except BaseException:
            transport.close()
            raise
        self._process_set = chosen
        self._engine.steps.owned_by = lambda stepping: getattr(stepping, "_compression", None) is self
        stand_in = StandIn(hvd, transport, chosen, self._engine.count_bytes)
        self._engine.on_step_begin, self._engine.check_peers = stand_in.send, stand_in.check
        if given is None and optimizer is not None:
            announce_owner(optimizer, self._engine.steps)

    @property
    def engine(self) -> Engine | None:
        """The bound engine; None before :meth:`bind`, with one process, or outside the process set."""
        return self._engine

    @property
    def is_bound(self) -> bool:
        """Whether the compressor belongs to a model already."""
        return self._bound

    # -- Horovod's Compressor ------------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start the exchange of a gradient; Horovod reduces a one-element stand-in in the meantime.

        Errors about the gradient are raised by :meth:`decompress`, on all ranks.

        Raises:
            ConfigError: ``op=Adasum``, or the compressor is not bound to a model.
        """
        if self._engine is None and self._bound:
            return tensor, None  # a process set of one rank: Horovod calls, but there is nobody to exchange with
        if self._engine is None:
            raise ConfigError(
                f"Compression.{self.config.algorithm}(...) was given no parameters: pass model.named_parameters() and "
                "optimizer=, or use dgc.torch.DistributedOptimizer, which binds them"
            )
        if isinstance(tensor, torch.nn.Parameter):
            raise ConfigError("op=Adasum cannot be combined with gradient compression; use op=hvd.Average")
        if self._is_exchanged(self._engine):
            # synchronize() once more in the same step: the gradient is the step's result, clipped perhaps.
            self._engine.require_same_results()
            stand_in = torch.ones(1)
            self._engine.stats.add_sent(stand_in.nbytes)
            return stand_in, tensor
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self._deferred is None and not self._giving_up:
            try:
                self._submit(self._engine, tensor, result)
            except DGCError as error:
                # Raised here, in a backward hook, it would leave the other ranks waiting for this one's stand-in.
                self._deferred = error
        stand_in = torch.ones(1)
        self._engine.count_bytes(stand_in.nbytes)
        return stand_in, result

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Wait for the exchange and return the averaged result of the gradient that ``ctx`` stands for.

        Raises:
            ConfigError: the stand-in shows another op than the compressor was told of, or a joined rank.
            DGCError: this or another rank failed.
        """
        if ctx is None:
            return tensor
        assert self._engine is not None
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error
        check_stand_in(float(tensor), op=self.config.op, size=self._engine.transport.size)
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

    def _submit(self, engine: Engine, tensor: torch.Tensor, result: torch.Tensor) -> None:
        if not self._owner_checked:
            engine.steps.owner = find_owner(self)
            self._owner_checked = True
            _check_owner(engine, self._process_set)
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
        engine.submit(index, tensor, result)

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


def _check_owner(engine: Engine, process_set: Any) -> None:
    owner = engine.steps.owner
    theirs = getattr(owner, "process_set", process_set)
    if getattr(theirs, "process_set_id", None) != getattr(process_set, "process_set_id", None):
        # Raised here alone: the ranks outside the optimizer's set will never exchange.
        raise ConfigError(
            "hvd.DistributedOptimizer was given another process_set than the compressor; pass the same one to both: "
            "Compression.dgc(..., process_set=...)"
        )
    if getattr(owner, "sparse_as_dense", False):
        engine.fail(
            ConfigError(
                "sparse_as_dense=True hides which parameter a gradient belongs to; use dgc.torch.DistributedOptimizer, "
                "or give the embedding dense gradients (sparse=False)"
            )
        )
