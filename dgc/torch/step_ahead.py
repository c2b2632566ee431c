"""Step-ahead error feedback in PyTorch: after each ``step()`` of the optimizer, exchange what it has changed.

The optimizer steps on the gradient of its own rank, as in a script of one process. Nothing happens before ``step()``.
:mod:`dgc.core.step_ahead` explains the law.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from dgc.adapter.agreement import agree_or_raise, built_together, require_agreement, require_replicas
from dgc.adapter.step_ahead import EQUAL, StepAheadBase
from dgc.adapter.warm_up import compiled
from dgc.core.collectives import Transport, gather_values
from dgc.core.config import DGCConfig
from dgc.core.layout import Layout
from dgc.core.message import Disagreement, Flags
from dgc.core.step_ahead import StepAhead
from dgc.errors import ConfigError, DGCError, LayoutError, TransportError
from dgc.torch.front_end import follow_steps, learning_rates_of
from dgc.torch.horovod import broadcasting
from dgc.torch.joined_options import constant_options
from dgc.torch.tensors import Result, describe, local, samples, sum_of_bits, tensors_for

# Optimizers whose weight decay is a part of the gradient, unless an option of theirs says otherwise. The decay of most
# others (AdamW, Muon, Adafactor, Lion) shortens the parameters.
_COUPLED = tuple(
    getattr(torch.optim, name)
    for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "SGD", "ASGD", "Rprop")
)

Named = Sequence[tuple[str, torch.Tensor]]

_engines: weakref.WeakSet[StepAheadEngine] = weakref.WeakSet()


class StepAheadEngine(StepAheadBase):
    """The parameters of one model, their shared values, and the exchange of updates. Construction is collective.

    Attributes:
        parameters: the exchanged parameters in registration order.
        passes: whether DDP's hook was called since the last exchange, so that the other ranks will make a step.
    """

    what = "parameters"
    advice = "Build the same model and optimizer on every rank."

    def __init__(
        self, named: Callable[[], Named], config: DGCConfig, transport: Transport, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(config, transport)
        self.names = []
        self.parameters: list[torch.Tensor] = []
        self._outgoing: list[Result] = []  # with the option late, the memory of updates that are being exchanged
        self._stepping = self._edited = self._is_scaled = self.passes = False
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # values before a step that is not the script's

        def build() -> Layout:
            pairs = named()
            self.names, self.parameters = [n for n, _ in pairs], [p for _, p in pairs]
            self._tensors = compiled(config, lambda: tensors_for(self.parameters), lambda tensors: tensors.kernels)
            on_device = self._tensors.kernels.on_device  # without GPU kernels, all passes through host memory
            self._device = local(self.parameters[0]).device if on_device else torch.device("cpu")
            self.ahead = StepAhead(
                [describe(n, p) for n, p in pairs],
                config,
                self.between,
                self._tensors.kernels,
                rescales=_rescales(optimizer),
                convert=self._convert,
                to_host=lambda values: values.cpu().numpy(),
                rounding=self._rounding,
            )
            self.exchange = self._exchange = self.ahead.exchange
            return self.ahead.layout

        self._agree_on_options()
        self._agree_on_tensors(build)
        self._ids = {id(p) for p in self.parameters}
        self._marked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._forget = weakref.finalize(self, _forget_scaling, self._marked)
        self._forget.atexit = False
        self._follow(optimizer)
        follow_steps(_before_any_step, _after_any_step)
        _engines.add(self)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # A GradScaler lets an optimizer with this attribute step also after an overflow: see _unscale().
        if not getattr(optimizer, "_step_supports_amp_scaling", False):  # a fused optimizer unscales by itself
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            self._marked.add(optimizer)

    # -- around step() -------------------------------------------------------------------------------------------------

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps some of the parameters."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def require_own(self, parameters: Sequence[torch.Tensor]) -> None:
        """Require that the compressor is open, and that these parameters are its own.

        Raises:
            TransportError: it was closed: each rank would train on its own gradients.
            LayoutError: a parameter has another optimizer. All ranks raise an error.
        """
        if not self.is_open:
            raise TransportError("this compressor was closed; build a new one")
        if (other := next((p for p in parameters if id(p) not in self._ids), None)) is not None:
            self.fail(
                LayoutError(
                    f"the model's parameter of shape {tuple(other.shape)} is not one of the optimizer that was given "
                    "to the compressor, and nothing would average it: give one optimizer that owns all trained "
                    "parameters of the model or, for several optimizers, leave DDP out and wrap each in "
                    "dgc.DistributedOptimizer with a compressor of its own"
                )
            )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, and note edits outside of ``step()``. Horovod's ``step()`` causes this call twice."""
        # Horovod steps an optimizer without state before it broadcasts the state.
        self._stepping = bool(optimizer.state) or not broadcasting()
        if not self._stepping:
            self._kept = [(p, p.detach().clone()) for p in self.parameters]  # decay would move them
            return
        if optimizer is not self._optimizer() and not hasattr(optimizer, "skip_synchronize"):
            self._require_like_the_first(optimizer)
            self._follow(optimizer)
        self._is_scaled |= _unscale(optimizer, divides=optimizer in self._marked)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._ids and p.requires_grad and p.grad is not None:
                    self.fail(
                        LayoutError(
                            f"a parameter of shape {tuple(p.shape)} was not there, or needed no gradient, when the "
                            "compressor was built: build a new compressor after adding or unfreezing parameters"
                        )
                    )
        if not self.ahead.shared:
            self._start()
            return
        # Compare values, because an edit of ``p.data`` does not change the tensor's version.
        if self.exchange.in_step:
            self.exchange.wait()
        with self._told():
            self._edited = self.ahead.is_edited(map(self._read, self._places()))

    def _require_like_the_first(self, optimizer: torch.optim.Optimizer) -> None:
        if _rescales(optimizer) and self.ahead.noise is None:
            self.fail(
                ConfigError(
                    f"{type(optimizer).__name__} steps parameters whose compressor was built for an SGD, and does not "
                    "know how noisy a rank's gradients are: call reset() and close() of the compressor, and wrap the "
                    "module in a new DDP or the optimizer in dgc.DistributedOptimizer, with a new compressor"
                )
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange what the optimizer has changed, once for each of its steps."""
        if not self._stepping:
            with torch.no_grad():
                for p, value in self._kept:
                    p.copy_(value)
            self._kept = []
            return
        self._stepping = False
        self._exchange_updates(optimizer)

    def average(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Make the parameters, and the state of ``optimizer`` if it is given, equal on all ranks. Collective."""
        self.require_between_steps("average()", whole=True)
        if not self.ahead.shared:  # there was no step
            return
        self.meet("average()" if optimizer is None else "average(optimizer)")
        places, values = built_together(self.transport, self._values)
        self.ahead.average(values)
        self._write(places)
        if optimizer is not None:
            self._average_state(optimizer)
            self.exchange.state.is_equal = True

    def _average_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace each tensor of the optimizer's state by its mean over the ranks that have it.

        Counts of steps become the largest of all ranks. A rank without a state of a parameter gets that of the others.
        """
        states = [optimizer.state.get(p, {}) for p in self.parameters]
        own = [[i, key, _described(value)] for i, state in enumerate(states) for key, value in state.items()]
        found: dict[tuple[int, str], list[Any]] = {}  # for each entry the descriptions of all ranks, tensors first
        for i, key, described in itertools.chain(*gather_values(self.between, own)):
            each = found.setdefault((i, key), [])
            each.insert(0 if described[0] == TENSOR else len(each), described)
        tensors = [place for place in sorted(found) if found[place][0][0] == TENSOR]

        def build() -> np.ndarray:
            first: list[dict[str, Any]] = [{} for _ in states]
            for (i, key), each in found.items():
                first[i][key] = each[0]
            for i, (p, entries) in enumerate(zip(self.parameters, first, strict=True)):
                if entries and not states[i] and all(kind != OTHER for kind, *_ in entries.values()):
                    states[i] = {key: _make_entry(p, *described) for key, described in entries.items()}
                    optimizer.state[p] = states[i]
                if isinstance(states[i].get("step"), int):
                    states[i]["step"] = max(each[1] for each in found[i, "step"] if each[0] == PLAIN)
            return np.empty(max((math.prod(found[place][0][1]) for place in tensors), default=0), np.float32)

        room = built_together(self.transport, build)
        for i, key in tensors:
            entry, mean = states[i].get(key), room[: math.prod(found[i, key][0][1])]
            values = local(entry).detach() if isinstance(entry, torch.Tensor) else None
            mean.fill(0.0)
            if values is not None:
                torch.from_numpy(mean).view(values.shape).copy_(values)
            self.between.allreduce(mean, "max" if key == "step" else "sum")
            if key != "step":
                mean /= np.float32(sum(each[0] == TENSOR for each in found[i, key]))
            if values is not None:
                values.copy_(torch.from_numpy(mean).view(values.shape))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make the parameters the shared values; require that they are equal on all ranks. Collective."""

        def options() -> dict[str, Any]:
            optimizer = self._optimizer()
            return {} if optimizer is None else constant_options(optimizer)

        agree_or_raise(self.transport, options, "the optimizer's options", advice=EQUAL)
        require_replicas(
            self.transport,
            {n: samples(p) for n, p in zip(self.names, self.parameters, strict=True)},
            "before the first step call dgc.torch.broadcast_parameters(model.state_dict()) on all ranks, and load a "
            "checkpoint on all of them; with Horovod, before the wrapping, call hvd.broadcast_optimizer_state first "
            "and hvd.broadcast_parameters after it",
            sums=list(map(sum_of_bits, self.parameters)),
        )
        built_together(self.transport, lambda: self.ahead.start(self._values()[1]))
        self._edited = False

    def _exchange_updates(self, optimizer: torch.optim.Optimizer | None, joins: int = 0) -> None:
        self.passes = False
        with self._told():
            decays = [0.0] * len(self.parameters) if optimizer is None else _decays(optimizer, self.parameters)
            gradients = [None] * len(self.parameters) if optimizer is None else self._gradients()
            places, values = self._values()
            if self._config.late and not self._outgoing:
                self._outgoing = [self._tensors.result(torch.empty_like(each)) for each in values]
        sent, arrays = values, [place.array for place in places]
        if self._config.late:
            sent, arrays = [each.tensor for each in self._outgoing], [each.array for each in self._outgoing]
        # A script may leave out its scheduler after an overflow, which only some ranks had.
        rates = () if self._is_scaled else learning_rates_of(optimizer)
        try:
            self.ahead.step(
                values, gradients, decays, sent, arrays, late=self._config.late,
                ready=self._tensors.ready(), edited=self._edited, joins=joins, learning_rates=rates,
                rescales=optimizer is None or _rescales(optimizer),
            )  # fmt: skip
        except Disagreement:  # on all ranks
            shown: dict[str, object] = {f"lr of group {i}": float(f"{rate:.5e}") for i, rate in enumerate(rates)}
            require_agreement(self.transport, shown, "the optimizer's options", advice=EQUAL)
            raise
        finally:
            self._tensors.release()
            self._write(places)
        self._after_step()
        self._warn_of_edits()
        if self.exchange.state.step + self.exchange.in_step == self._config.steps:  # the training ends
            self.average()

    def _convert(self, array: Any) -> torch.Tensor:
        """Return a tensor that shares an array's memory; with GPU kernels, a copy of a host array on the GPU."""
        return torch.as_tensor(array, device=self._device)

    def _gradients(self) -> list[torch.Tensor | None]:
        grads = [p.grad for p in self.parameters]
        flat = [None if g is None or g.is_sparse else local(g).detach().reshape(-1).float() for g in grads]
        return [None if g is None else g.to(self._device) for g in flat]

    def _rounding(self, index: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        dtype = self.parameters[index].dtype
        return None if dtype in (torch.float32, torch.float64) else lambda values: values.to(dtype).to(values.dtype)

    def _values(self) -> tuple[list[Result], list[torch.Tensor]]:
        places = self._places()
        return places, [self._read(place) for place in places]

    def _places(self) -> list[Result]:
        return [self._place(p) for p in self.parameters]

    def _place(self, p: torch.Tensor) -> Result:
        return self._tensors.result(local(p).detach())

    def _read(self, place: Result) -> torch.Tensor:
        """Return the parameter's values, (n,), in its own memory if the core can write it."""
        flat = self._convert(place.array) if place.place is None else place.place
        if not place.is_view:
            flat.copy_(place.tensor.reshape(-1))
        return flat

    def _write(self, places: list[Result]) -> None:
        with torch.no_grad():
            for place in places:
                place.deliver()

    def _settle(self) -> None:
        """End an exchange that is under way, with the option ``late``; keep what the script has changed since."""
        if self.exchange.in_step and not self._stepping:
            self.exchange.wait()
            edits = self.ahead.edits(self._values()[1])
            try:
                self.ahead.settle()
            finally:
                self._write_shared()
            if edits is not None:  # the next step or average() looks for them
                places, values = self._values()
                for p, edit in zip(values, edits, strict=True):
                    p += edit
                self._write(places)

    def _write_shared(self) -> None:
        places, values = self._values()
        self.ahead.write(values)
        self._write(places)

    @override
    def close(self, keep_transport: bool = False) -> None:
        super().close(keep_transport)
        self._forget()

    # -- ranks without data --------------------------------------------------------------------------------------------

    def exchange_nothing(self) -> None:
        """Take part in one exchange with updates of 0."""
        if not self.ahead.shared:
            self._start()
        self._exchange_updates(None, Flags.JOINED)

    def end_join(self) -> None:
        """Average the parameters at the end of torch's ``Join``. Collective.

        DDP has given every rank the parameters of the last one, in which this rank's unsent updates are missing.
        """
        if self.ahead.shared:
            self._write_shared()
            self.average()

    def join(self) -> int:
        """Take part in the other ranks' steps without data, until all ranks have joined. Collective.

        Returns:
            The rank that joined last (the highest of several).
        """
        self.require_between_steps("join()")

        def step() -> None:
            self.exchange_nothing()
            self._settle()

        last = self.until_all_joined(step)
        self.average()
        return last

    # -- state ---------------------------------------------------------------------------------------------------------

    @override
    def require_between_steps(self, what: str, *, whole: bool = False) -> None:
        self._settle()
        super().require_between_steps(what, whole=whole)

    @override
    def _find_edited(self) -> list[bool]:
        return [] if self._stepping else self.ahead.find_edited(map(self._read, self._places()))

    @override
    def abandon(self) -> bool:
        """Also end an exchange that is under way, with the option ``late``. Loaded parameters stay as they are."""
        if self.exchange.in_step and not self._stepping and not self.exchange.has_failed:
            self.exchange.wait()
            loaded = [
                (p, p.detach().clone())
                for p, edited in zip(self.parameters, self._find_edited(), strict=True)
                if edited
            ]
            try:
                self._settle()
            except DGCError:  # another rank is gone, or no rank has taken the step
                return super().abandon()
            with torch.no_grad():
                for p, value in loaded:
                    p.copy_(value)
        return super().abandon()

    @override
    def _clear(self) -> None:
        self._stepping = self._edited = False
        if self.ahead.shared:
            places, values = self._values()
            self.ahead.restart(values, self._loaded)  # the next step compares the ranks' parameters again
            self._write(places)


TENSOR, PLAIN, OTHER = "tensor", "plain", "other"  # kinds of entries of an optimizer's state


def _described(value: Any) -> list[Any]:
    """Return a description from which :func:`_make_entry` makes such an entry on another rank."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        own = local(value)
        return [TENSOR, list(own.shape), str(own.dtype).removeprefix("torch."), own.device.type == "cpu"]
    return [PLAIN, value] if value is None or isinstance(value, (bool, int, float)) else [OTHER]


def _make_entry(p: torch.Tensor, kind: str, value: Any, dtype: str = "", on_cpu: bool = False) -> Any:
    """Return an entry of the state of p: a plain value, or zeros of the shape ``value``."""
    if kind == PLAIN:
        return value
    own, of = local(p), getattr(torch, dtype)
    if value == list(own.shape) and on_cpu == (own.device.type == "cpu"):
        return torch.zeros_like(p.detach(), dtype=of)  # of a DTensor, another one
    return torch.zeros(value, dtype=of, device="cpu" if on_cpu else own.device)


def _decays(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[float]:
    """Return, for each parameter, the share that the optimizer's decoupled weight decay takes off in a step."""
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", not isinstance(optimizer, _COUPLED))
        decay = float(group["lr"]) * float(group.get("weight_decay", 0.0)) if decoupled else 0.0
        found.update((id(p), decay) for p in group["params"] if p.grad is not None)  # others do not decay
    return [found.get(id(p), 0.0) for p in parameters]


def _rescales(optimizer: torch.optim.Optimizer) -> bool:
    return not isinstance(optimizer, torch.optim.SGD)


def require_no_other(named: Named) -> None:
    """Refuse parameters whose updates are exchanged already."""
    ids = {id(p) for _, p in named}
    if any(each.is_open and not ids.isdisjoint(each._ids) for each in list(_engines)):
        raise ConfigError(
            "these parameters' updates are exchanged already, by another compressor: use one of them, once, or close() "
            "the other one first"
        )


def _forget_scaling(marked: weakref.WeakSet[torch.optim.Optimizer]) -> None:
    for optimizer in marked:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _unscale(optimizer: Any, *, divides: bool) -> bool:
    """Divide the gradients by a GradScaler's scale, or drop them if they overflow: this rank then contributes nothing.

    For an optimizer with ``_step_supports_amp_scaling``, a GradScaler sets these two attributes and calls ``step()``
    also after an overflow. A plain optimizer's ``step()`` would be skipped on this rank, and the others would wait.

    Returns:
        Whether a GradScaler calls this ``step()``.
    """
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    gradients = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if found is not None and bool(found):
        for p in gradients:
            p.grad = None
    elif scale is not None and divides:
        for p in gradients:
            p.grad.div_(scale.to(p.grad.device))
    if found is not None and divides:
        optimizer.found_inf = optimizer.grad_scale = None
    return found is not None


def _before_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    owners = [engine for engine in list(_engines) if engine.owns(optimizer)]
    if owners and not any(engine.is_open for engine in owners):
        if hasattr(optimizer, "skip_synchronize") and not broadcasting():  # it is still a distributed optimizer
            raise TransportError("this compressor was closed; build a new one")
        return
    for engine in owners:
        if engine.is_open:
            engine.before_step(optimizer)


def _after_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for engine in list(_engines):
        if engine.is_open and engine.owns(optimizer):
            engine.after_step(optimizer)
