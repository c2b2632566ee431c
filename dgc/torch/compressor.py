"""``dgc.torch.Compression``, and the compressor that its constructors return."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from dgc.adapter.checks import (
    checked_tensors,
    require_momentum_source,
    warn_of_sparsity,
    warn_of_thin_updates,
    warn_of_unmatched,
    warn_once,
)
from dgc.adapter.compressor import CompressionBase
from dgc.adapter.job import Job
from dgc.core.checks import as_loss_scale, brief
from dgc.core.collectives import Transport
from dgc.core.exchange.exchange import LossScale
from dgc.errors import ConfigError, LayoutError
from dgc.torch.adoption import is_adaptive, updater_of, updating_class
from dgc.torch.distributed import UNNAMED, require_own_shards
from dgc.torch.engine import Engine
from dgc.torch.front_end import require_free
from dgc.torch.horovod import HOROVOD, Heartbeat, TorchHorovod, announce_owner
from dgc.torch.horovod_optimizer import HorovodCompressor
from dgc.torch.scaler import read_scale
from dgc.torch.step_ahead import StepAheadEngine, require_no_other
from dgc.torch.untraced import leave_hooks_untraced

_ADVICE = "model.named_parameters()"

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class DGCCompressor(HorovodCompressor):
    """A compressor (Deep Gradient Compression, unless another is named) for one model and one optimizer.

    ``dgc.torch.DistributedOptimizer`` binds it and gives it gradients. Horovod's own ``hvd.DistributedOptimizer`` calls
    its ``compress()`` and ``decompress()``. In a job of one process the optimizer keeps its momentum.
    """

    _job: Job = HOROVOD

    def use_job(self, job: Job) -> None:
        """Exchange between these ranks instead of Horovod's."""
        self._job = job

    def bind(
        self,
        named_parameters: NamedParameters,
        optimizer: torch.optim.Optimizer | None = None,
        process_set: Any = None,
        *,
        stock: bool = False,
    ) -> None:
        """Attach the compressor to a model's parameters. Collective over the process set.

        Args:
            named_parameters: (name, parameter) pairs, at least those of the optimizer.
            optimizer: the optimizer. Its parameters with ``requires_grad`` form the layout, and its options are
                adopted.
            process_set: the Horovod process set of the exchange; None means the option ``process_set``, or all ranks.
            stock: whether Horovod will build its own optimizer from this one.

        Raises:
            ConfigError: the compressor was bound before, Horovod is elastic, or a needed library is missing.
            LayoutError: ranks disagree about the parameters.
        """
        with self.errors_on_all_ranks(process_set):
            if self.is_bound:
                raise ConfigError(
                    "this compressor is already bound to a model; residuals cannot be shared: build one compressor for "
                    "each model and optimizer"
                )
            _refuse_torchs_zero(optimizer)
            named = list(named_parameters)
            is_sharded, adaptive = updater_of(optimizer) is not optimizer, is_adaptive(optimizer)
            self.config = self.config.suited(adaptive, steps_ahead=not is_sharded)
            if self.config.steps_ahead and is_sharded:
                raise ConfigError(
                    f"{type(optimizer).__name__} steps only a share of the parameters on each rank; step-ahead error "
                    "feedback needs a step of all parameters: leave out error_feedback='step-ahead'"
                )
            groups = [] if optimizer is None else optimizer.param_groups
            owned = {id(p) for group in groups for p in group["params"]}
            exchanged = [(n, p) for n, p in named if optimizer is None or id(p) in owned]
            require_no_other(exchanged)
            require_own_shards(exchanged, self._job)

        def open_engine(transport: Transport) -> Any:
            job = self.job(process_set)
            self.config = self.config.on_ranks(transport.size)
            if self.config.steps_ahead:
                return StepAheadEngine(lambda: _layout_of(named, optimizer), self.config, transport, optimizer)
            heartbeat = None
            if isinstance(job, TorchHorovod) and transport.name == "horovod":  # here a rank may have joined
                heartbeat = Heartbeat(job, lambda: engine.stats)
            engine = Engine(
                lambda: _layout_of(named, optimizer),
                self.config,
                transport,
                optimizer=optimizer,
                loss_scale=self._loss_scale,
            )
            engine.on_step_begin = heartbeat
            return engine

        self._bind(process_set, open_engine)
        if self.engine is not None and self.engine.transport.rank == 0:
            for option in ("include", "exclude"):
                warn_of_unmatched(option, getattr(self.config, option), [name for name, _ in named], "parameter")
            warn_of_sparsity(self.config, self.given_options, adaptive)
            if adaptive:
                warn_of_thin_updates(updating_class(optimizer).__name__, self.config)
            if issubclass(updating_class(optimizer), torch.optim.LBFGS) and self.config.sparsities[-1]:
                warn_once(
                    "LBFGS learns far less from compressed gradients, because it compares gradients of several points: "
                    "train it without a compressor"
                )
        if self.config.steps_ahead:
            return
        if stock and self.engine is not None:
            leave_hooks_untraced()
            front_end = self._follow_horovod(self.engine)
            if optimizer is not None:
                announce_owner(optimizer, front_end.own)

    def state_dict(self, own: bool = False) -> dict[str, Any]:
        """Return the state, with tensors instead of arrays, because ``torch.load`` accepts these by default."""
        state: dict[str, Any] = tree_map_only(np.ndarray, torch.from_numpy, super().state_dict(own))
        return state

    @override
    def fitting_state(self, state: Any) -> Mapping[str, Any]:
        return super().fitting_state(tree_map_only(torch.Tensor, lambda t: t.detach().cpu().numpy(), state))

    def _read_loss_scale(self, value: object) -> LossScale:
        """Accept a number, a function, or an object with ``get_scale()`` (a GradScaler)."""
        get_scale = getattr(value, "get_scale", None)
        if get_scale is not None and not getattr(value, "is_enabled", lambda: True)():
            return 1.0  # a script written for a GPU is running without one
        return as_loss_scale(value, "GradScaler") if get_scale is None else partial(read_scale, value)


class TorchCompression(CompressionBase[NamedParameters, torch.optim.Optimizer, DGCCompressor]):
    """The values of ``compression=``.

    The first argument of a compressor's constructor is ``model.named_parameters()``, as in Horovod's wrappers, because
    torch's parameters have no names. Momentum, Nesterov and weight decay are taken from a ``torch.optim.SGD``.
    ``loss_scale`` also accepts a GradScaler.
    """

    def _make(
        self,
        algorithm: str,
        parameters: NamedParameters | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> DGCCompressor:
        with self._errors_on_all_ranks(parameters, options):
            if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"optimizer is {brief(optimizer)}; give a torch.optim.Optimizer")
            named = None if parameters is None else _checked_names(parameters, algorithm)
            compressor = DGCCompressor(options, algorithm)
            if named is None:
                if optimizer is not None:
                    raise ConfigError(f"Compression.{algorithm}(optimizer=...) also needs parameters={_ADVICE}")
                return compressor
            require_momentum_source(optimizer, compressor.config, "parameters")
        compressor.bind(named, optimizer, stock=True)
        return compressor


def _refuse_torchs_zero(optimizer: object) -> None:
    module = sys.modules.get("torch.distributed.optim")  # not imported here, because that takes a second
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        raise ConfigError(
            "torch's ZeroRedundancyOptimizer steps only a share of the parameters on each rank and does not tell the "
            "compressor which: replace it by dgc.torch.ZeroRedundancyOptimizer, which takes the same arguments"
        )


def named_pairs(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) pairs, checked as Horovod does."""
    if named_parameters is None:
        return [
            (f"{UNNAMED}.{i}.{j}", p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        ]
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ConfigError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    counts = collections.Counter(name for name, _ in pairs)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ConfigError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    known = {id(p) for _, p in pairs}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if missing:
        raise ConfigError(
            f"named_parameters was specified, but {len(missing)} of the optimizer's parameters were not named, the "
            f"first of shape {tuple(missing[0].shape)}; pass model.named_parameters() of the whole model (a generator "
            "can be used once only)"
        )
    return pairs


def _layout_of(
    named_parameters: NamedParameters, optimizer: torch.optim.Optimizer | None
) -> list[tuple[str, torch.Tensor]]:
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


def _checked_names(value: object, algorithm: str) -> list[tuple[str, torch.Tensor]]:
    named = checked_tensors(value, algorithm, "parameters", _ADVICE)
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ConfigError(f"Compression.{algorithm} needs (name, parameter) pairs: pass {_ADVICE}")
    return named


Compression = TorchCompression(HOROVOD)


def check_optimizer(optimizer: object, named_parameters: object) -> None:
    """Refuse an object that is not a plain optimizer, and arguments in the wrong order."""
    if isinstance(named_parameters, DGCCompressor):
        raise ConfigError("named_parameters is a compressor; pass it by its name: compression=...")
    if hasattr(optimizer, "skip_synchronize"):
        raise ConfigError("this optimizer is distributed already; wrap the plain optimizer only once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is {brief(optimizer)}; give a torch.optim.Optimizer")
    require_free([p for group in optimizer.param_groups for p in group["params"]], exclusively=True)
