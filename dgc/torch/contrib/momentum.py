"""``DGCMomentum``: Paddle's ``DGCMomentumOptimizer`` for PyTorch.

It is a ``torch.optim.SGD`` in dgc's ``DistributedOptimizer``. The compressor takes momentum, Nesterov and weight decay
from it, as from any SGD. This module adds Paddle's arguments, regularizers, ``minimize`` and form of state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.job import Job, errors_on_all_ranks
from dgc.contrib.paddle import (
    COMPRESSED_TYPES,
    MIN_NUMEL,
    NEVER,
    L1Decay,
    PaddleOptions,
    Regularizer,
    StateError,
    as_state_error,
    coefficient,
    one_rate,
    require_keys,
    warn_of_kept_residuals,
    warn_of_one_process,
)
from dgc.core.collectives import Transport
from dgc.errors import ConfigError, LayoutError
from dgc.torch.compressor import DGCCompressor
from dgc.torch.distributed import job_of
from dgc.torch.optimizer import DistributedOptimizer
from dgc.torch.tensors import describe

_COMPARED = ("lr", "momentum", "nesterov", "weight_decay", "l1")  # options of a group that must be equal on all ranks


class _Compressor(DGCCompressor):
    @override
    def needs_engine(self, job: Job) -> bool:
        return True  # even in one process, it applies the momentum and the L1 decay


class DGCMomentum(torch.optim.SGD):
    """Momentum SGD with Deep Gradient Compression, under Paddle's names.

    It averages gradients itself, beginning in ``backward()``; do not wrap it in a ``DistributedOptimizer``. It has the
    same methods ``synchronize()`` and ``skip_synchronize()``, and its attribute ``compression`` is the compressor.

    Before ``rampup_begin_step`` it is momentum SGD on averaged gradients. From then on every tensor of at least
    ``min_numel`` elements sends its largest accumulated entries and keeps the rest for later. One process compresses
    nothing, and there is a warning.

    Source: PaddlePaddle 1.6, ``DGCMomentumOptimizer``; Lin et al. 2018, arXiv 1712.01887.
    """

    compression: DGCCompressor
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        params: Any,
        learning_rate: float | None = None,
        momentum: float | None = None,
        rampup_begin_step: int | None = None,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        use_nesterov: bool = False,
        local_grad_clip_norm: float | None = None,
        num_trainers: int | None = None,
        regularization: Regularizer = None,
        name: str | None = None,
        *,
        lr: float | None = None,
        min_numel: int = MIN_NUMEL,
        dtypes: Sequence[str] = COMPRESSED_TYPES,
        exclude: Sequence[str] = (),
        process_set: Any = None,
        transport: str | Transport = "auto",
        loss_scale: Any = 1.0,
        **codecs: Any,
    ) -> None:
        """Build the optimizer. Collective over the process set.

        docs/elsewhere.md has a table of the arguments. ``params`` are parameters, (name, parameter) pairs or group
        dicts. A group may have its own ``lr``, ``momentum``, ``nesterov`` and ``regularization``. A parameter's
        attribute ``regularizer`` takes precedence; such parameters are moved to new groups at the end.

        Raises:
            ArgumentError: (an AssertionError, as in Paddle) an argument is wrong that Paddle refuses.
            ConfigError: (a ValueError) another option is out of range, or neither Horovod nor torch.distributed is
                initialised.
            TypeError: ``rampup_begin_step`` is missing, or an option is unknown.
            LayoutError: ranks disagree about the parameters.
        """
        arguments = dict(locals())
        if hasattr(type(self), "skip_synchronize"):  # Horovod derives a class from this one
            raise ConfigError("DGCMomentum averages gradients itself; use it without DistributedOptimizer")
        with errors_on_all_ranks(job_of(), process_set, transport=transport):
            job = job_of().of(process_set)
        job.require_ready()
        link = job.make_transport(transport)

        def build() -> dict[str, Any]:
            arguments["learning_rate"] = one_rate(learning_rate, lr)
            self.options = PaddleOptions(**{f.name: arguments[f.name] for f in fields(PaddleOptions)})
            self.options.check_ranks(link.size)
            nesterov, factor = self.options.use_nesterov, float(self.options.momentum)
            rate = self.options.learning_rate
            if not (isinstance(rate, (float, torch.Tensor)) and math.isfinite(rate) and rate >= 0):
                raise ConfigError(
                    f"learning_rate is {rate!r}; allowed: a number >= 0. Schedules are torch's lr_scheduler"
                )
            super(DGCMomentum, self).__init__(params, rate, factor, nesterov=nesterov)
            self._part_regularized()
            return self._described(self.param_groups)

        agree_or_raise(link, build, "arguments")
        named = [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
        options = self.options.core_options([describe(n, p) for n, p in named if p.requires_grad])
        if link.size == 1:
            warn_of_one_process()
            options["rampup_begin_step"] = NEVER
        options.update(transport=link, process_set=process_set, loss_scale=loss_scale)
        compression = _Compressor(options)
        DistributedOptimizer(self, named, compression)
        # In one process, the engine has another begin. States are those of jobs with this one.
        compression.config = replace(compression.config, rampup_begin_step=self.options.rampup_begin_step)
        self._read_l1()

    def minimize(self, loss: torch.Tensor) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Make one step: clear the gradients, call ``loss.backward()`` and ``step()``.

        Returns:
            An empty list in place of Paddle's operators, and (parameter, its ``.grad`` after the step) pairs.
        """
        distributed: Any = self
        self.zero_grad()
        loss.backward()
        distributed.synchronize()  # this writes the results into .grad
        with distributed.skip_synchronize():
            self.step()
        return [], [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while torch's constructor runs; refuse later ones.

        Raises:
            ConfigError: the optimizer is built already, or the group has ``weight_decay``.
            ArgumentError: the group's ``regularization`` is not a regulariser.
        """
        if hasattr(self, "compression"):
            raise ConfigError("parameters cannot be added to DGCMomentum: build a new one with all of them")
        if "weight_decay" in param_group:
            raise ConfigError("a parameter group has weight_decay; give it regularization=L2Decay(coefficient)")
        group = {"regularization": self.options.regularization, **param_group}
        decay = _decay(group.pop("regularization"), "a group's regularization")
        super().add_param_group({**group, **decay})

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state. Call ``compression.average(self)`` on all ranks before, and save one rank's.

        Returns:
            Torch's ``"state"`` (empty) and ``"param_groups"``; and ``"compression"``, which holds u (the momentum
            buffers), v (the residuals) and the step.

        Raises:
            LayoutError: the state may differ between ranks.
        """
        return {**super().state_dict(), "compression": self.compression.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`, of a job of any size. Call it on all ranks.

        Raises:
            StateError: (an AssertionError and a ValueError) the state belongs to another model, or the ranks' states
                differ.
            RuntimeError: a buffer is neither a tensor nor an array.
        """
        engine = self.compression.engine
        assert engine is not None

        def look() -> dict[str, Any]:
            require_keys(state_dict, ("state", "param_groups", "compression"))
            self._require_fitting(state_dict)
            return self._described(state_dict["param_groups"])

        engine.abandon()  # an unfinished step would use the transport
        agree_or_raise(engine.transport, look, "states", LayoutError, "Load the same state on every rank.")
        with as_state_error():
            self.compression.load_state_dict(state_dict["compression"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "compression"})
        self._read_l1()  # a loaded group brings its own
        if engine.transport.size == 1 and self.compression.residual_norm > 0:
            warn_of_kept_residuals()

    set_dict = load_state_dict  # Paddle's name

    def __repr__(self) -> str:
        return super().__repr__() if self.options.name is None else f"{self.options.name}: {super().__repr__()}"

    def _read_l1(self) -> None:
        """Tell the compressor which parameters decay by their sign."""
        engine = self.compression.engine
        assert engine is not None
        l1 = {id(p) for group in self.param_groups if group["l1"] for p in group["params"]}
        by_sign = {i for i, p in enumerate(engine.parameters) if id(p) in l1}
        engine.decay_of = lambda i, values: values.sign() if i in by_sign else values

    def _part_regularized(self) -> None:
        """Name all parameters, and move those with an attribute ``regularizer`` to new groups at the end."""
        kept, moved = [], []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"group{number}.{i}" for i in range(len(group["params"]))]
            by_regularizer: dict[Any, list[tuple[str, torch.Tensor]]] = {None: []}
            for name, p in zip(names, group["params"], strict=True):
                own = getattr(p, "regularizer", None)
                coefficient(own, f"the regularizer of {name!r}")
                by_regularizer.setdefault(own, []).append((name, p))
            for own, pairs in by_regularizer.items():
                held = {"param_names": [name for name, _ in pairs], "params": [p for _, p in pairs]}
                if own is None:
                    kept.append({**group, **held})
                else:
                    moved.append({**group, **_decay(own), **held})
        self.param_groups = [group for group in (*kept, *moved) if group["params"]]

    def _described(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{key} of group {i}": float(group[key]) for i, group in enumerate(groups) for key in _COMPARED}

    def _require_fitting(self, state: Mapping[str, Any]) -> None:
        there, here = ([len(g["params"]) for g in groups] for groups in (state["param_groups"], self.param_groups))
        if there != here:
            raise StateError(f"the state dict has groups of {there} parameters, the optimizer of {here}")
        for name, entry in state["compression"].get("parameters", {}).items():
            for key, value in entry.items():
                if not isinstance(value, (torch.Tensor, np.ndarray)):
                    raise RuntimeError(f"{key} of {name!r} is a {type(value).__name__}; allowed: a tensor or an array")


def _decay(regularizer: Regularizer, what: str = "") -> dict[str, Any]:
    """Return a group's decay as plain numbers, so that a state dict loads with ``weights_only=True``."""
    decay = coefficient(regularizer, what)
    return {"weight_decay": decay, "l1": isinstance(regularizer, L1Decay) and decay > 0}
