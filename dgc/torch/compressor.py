"""The object behind ``compression=``: a Horovod ``Compressor`` that remembers what it has not sent yet."""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dgc.core.config import DGCConfig, make_config
from dgc.core.errors import ConfigError, DGCError, LayoutError
from dgc.core.state import resized
from dgc.core.stats import Stats
from dgc.core.transport import Transport
from dgc.torch.engine import Engine
from dgc.torch.horovod import import_horovod
from dgc.torch.stand_in import JOINED, StandIn
from dgc.torch.transports import make_transport

NamedParameters = Iterable[tuple[str, torch.Tensor]]

_ADAPTER_OPTIONS = ("transport", "loss_scale", "process_set")


class DGCCompressor:
    """Deep Gradient Compression for one model and one optimizer.

    Way A hands it to stock ``hvd.DistributedOptimizer(compression=...)``, which calls :meth:`compress` and
    :meth:`decompress`; way B (``dgc.torch.DistributedOptimizer``) binds it and drives its engine itself.
    With one process Horovod calls no compressor: nothing is adopted, and the optimizer keeps its momentum.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Check the options; the parameters come with :meth:`bind`.

        Raises:
            TypeError: an option is unknown.
            ConfigError: an option is out of range.
        """
        options = dict(options)
        self._adapter = {name: options.pop(name) for name in _ADAPTER_OPTIONS if name in options}
        self._op_was_given = "op" in options
        options["op"] = _op_name(options.get("op", "average"))
        self.config: DGCConfig = _checked(options)
        self._engine: Engine | None = None
        self._bound = False
        self._dummy_value = 1.0
        self._deferred: DGCError | None = None

    def use_op(self, op: Any) -> None:
        """Take the reduce op of the optimizer that is about to bind this compressor.

        Raises:
            ConfigError: the compressor was given another one, or it is neither Average nor Sum.
        """
        name = _op_name(op)
        if self._op_was_given and name != self.config.op:
            raise ConfigError(
                f"the compressor was told op={self.config.op}, the optimizer op={name}; pass one op to both, or leave "
                "it out of the compressor"
            )
        self.config = dataclasses.replace(self.config, op=name)

    # -- binding -------------------------------------------------------------------------------------------------

    def bind(
        self,
        named_parameters: NamedParameters,
        optimizer: torch.optim.Optimizer | None,
        process_set: Any = None,
    ) -> None:
        """Attach to a model's parameters; collective over the process set.

        Args:
            named_parameters: (name, parameter) pairs, at least those of the optimizer.
            optimizer: whose parameters with ``requires_grad`` form the layout, and whose options are adopted.
            process_set: the Horovod process set of the exchange; None means the option's, or all ranks.

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
        self._engine = Engine(
            _layout_of(named_parameters, optimizer, transport),
            self.config,
            transport,
            optimizer=optimizer,
            loss_scale=self._adapter.get("loss_scale", 1.0),
        )
        self._dummy_value = float(transport.size) if self.config.op == "sum" else 1.0
        stand_in = StandIn(hvd, transport, chosen)
        self._engine.on_step_begin, self._engine.check_peers = stand_in.send, stand_in.check

    @property
    def engine(self) -> Engine | None:
        """The bound engine; None before :meth:`bind`, with one process, or outside the process set."""
        return self._engine

    # -- Horovod's Compressor ------------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start the exchange of a gradient; Horovod reduces a one-element stand-in in the meantime.

        Errors about the gradient are raised by :meth:`decompress`, on all ranks.

        Raises:
            ConfigError: ``op=Adasum``, or the compressor is not bound to a model.
        """
        if self._engine is None:
            raise ConfigError(
                "Compression.dgc(...) was given no parameters: pass model.named_parameters() and optimizer=, or use "
                "dgc.torch.DistributedOptimizer, which binds them"
            )
        if isinstance(tensor, torch.nn.Parameter):
            raise ConfigError("op=Adasum cannot be combined with gradient compression; use op=hvd.Average")
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self._deferred is None:
            try:
                self._submit(self._engine, tensor, result)
            except DGCError as error:
                # Raised here, in a backward hook, it would leave the other ranks waiting for this one's stand-in.
                self._deferred = error
        return torch.ones(1), result

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
        self._check_stand_in(float(tensor))
        self._engine.finish()
        return ctx

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Bytes sent and received, dense bytes, ratio, density and seconds per phase, of the last step and in total."""
        return self._engine.stats if self._engine is not None else Stats()

    @property
    def residual_norm(self) -> float:
        """L2 norm of what this rank has not sent yet."""
        return self._engine.exchange.state.residual_norm() if self._engine is not None else 0.0

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: residuals, momentum buffers and step. It differs between ranks; never broadcast it.

        Raises:
            LayoutError: called in the middle of a step.
        """
        return self._engine.state_dict() if self._engine is not None else {"inactive": True, "rank": 0, "size": 1}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], resize: bool = False) -> None:
        """Continue from a saved state; call it on all ranks.

        Args:
            state: what :meth:`state_dict` returned on this rank; with ``resize=True`` a list of all old ranks' states.
            resize: redistribute the residuals of N old ranks to this job's M ranks, so that their mean is kept.

        Raises:
            LayoutError: the state belongs to another model, rank or number of ranks.
        """
        if self._engine is None:
            return
        if not resize:
            if not isinstance(state, dict):
                raise LayoutError(f"load_state_dict got {len(state)} states; pass this rank's own, or resize=True")
            if state.get("inactive"):
                raise LayoutError(
                    "the saved compressor state is one of a single process, which keeps none; do not load it, or pass "
                    "resize=True to start with empty residuals"
                )
            self._engine.load_state_dict(state)
            return
        states = [state] if isinstance(state, dict) else list(state)
        transport = self._engine.transport
        if states[0].get("inactive"):
            self._engine.reset()
            return
        if len(states) != states[0]["size"]:
            raise LayoutError(
                f"resize=True needs the states of all {states[0]['size']} old ranks in rank order, got {len(states)}"
            )
        own = resized(states, transport.rank, transport.size, self.config.rampup_begin_step)
        self._engine.load_state_dict({**own, "rank": transport.rank, "size": transport.size})

    def reset(self) -> None:
        """Forget residuals, momentum buffers, the step and the statistics; call it on all ranks."""
        if self._engine is not None:
            self._engine.reset()

    def close(self) -> None:
        """End the communication thread and free the communicator."""
        if self._engine is not None:
            self._engine.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _submit(self, engine: Engine, tensor: torch.Tensor, result: torch.Tensor) -> None:
        if engine.owner is None:
            engine.owner = _find_owner(self)
            _check_owner(engine)
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
        start = getattr(self, "_last_found", 0)
        for offset in range(count):
            index = (start - offset) % count
            if engine.parameters[index].grad is tensor:
                self._last_found = index - 1
                return index
        return None

    def _check_stand_in(self, value: float) -> None:
        if abs(value - self._dummy_value) < 1e-3:
            return
        assert self._engine is not None
        size = self._engine.transport.size
        if abs(value - size) < 1e-3:
            raise ConfigError(
                "Horovod sums the gradients (op=hvd.Sum) but the compressor averages; pass the same op to both: "
                "Compression.dgc(..., op=hvd.Sum)"
            )
        if self.config.op == "sum" and abs(value - 1.0) < 1e-3:
            raise ConfigError(
                "the compressor was told op=Sum but Horovod averages the gradients; pass the same op to both: "
                "hvd.DistributedOptimizer(..., op=hvd.Sum)"
            )
        raise ConfigError(
            f"the ranks' stand-ins gave {value:g} instead of {self._dummy_value:g}: {JOINED}; or the op is not one "
            "that the compressor supports (hvd.Average and hvd.Sum)"
        )


def _checked(options: dict[str, Any]) -> DGCConfig:
    try:
        return make_config(options)
    except TypeError as error:
        raise TypeError(f"{error}, {', '.join(_ADAPTER_OPTIONS)}") from None


def _op_name(op: Any) -> str:
    """Horovod's reduce op, or its name, as the core calls it."""
    if isinstance(op, str):
        return op.lower()
    hvd = import_horovod()
    if op == hvd.Average:
        return "average"
    if op == hvd.Sum:
        return "sum"
    raise ConfigError(f"op is {op!r}; gradient compression supports hvd.Average and hvd.Sum (not Adasum)")


def _layout_of(
    named_parameters: NamedParameters, optimizer: torch.optim.Optimizer | None, transport: Transport
) -> list[tuple[str, torch.Tensor]]:
    named = [(n, p) for n, p in named_parameters if p.requires_grad]
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


def _find_owner(compressor: DGCCompressor) -> weakref.ref[torch.optim.Optimizer]:
    """The Horovod optimizer that is calling compress(): it is a local of one of the callers' frames.

    Horovod tells a compressor nothing about its optimizer, and builds a new one from the user's groups.
    """
    frame = sys._getframe(3)
    for _ in range(8):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.optim.Optimizer) and getattr(candidate, "_compression", None) is compressor:
            return weakref.ref(candidate)
        if frame.f_back is None:
            break
        frame = frame.f_back
    raise ConfigError("compress() was called by something else than a Horovod DistributedOptimizer for PyTorch")


def _check_owner(engine: Engine) -> None:
    owner = engine.owner() if engine.owner is not None else None
    if getattr(owner, "sparse_as_dense", False):
        engine.fail(
            ConfigError(
                "sparse_as_dense=True hides which parameter a gradient belongs to; use dgc.torch.DistributedOptimizer, "
                "or give the embedding dense gradients (sparse=False)"
            )
        )
