"""Let Horovod's own ``DistributedOptimizer`` use our compressor.

Horovod passes each gradient to ``compress()``, reduces the one-element placeholder that this method returns, and puts
the result of ``decompress()`` into ``.grad``. ``horovod.py`` finds the calling optimizer, and makes the placeholders.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from dgc.adapter.compressor import CompressorBase
from dgc.adapter.job import check_placeholder
from dgc.core.checks import no_compressor
from dgc.errors import ConfigError, DGCError, LayoutError, StallError
from dgc.torch.engine import Engine
from dgc.torch.front_end import Closure, FrontEnd, Waiting, changed_gradient
from dgc.torch.horovod import Placeholders, find_owner, wait_for
from dgc.torch.optimizer_front_end import HandedOver
from dgc.torch.step_ahead import StepAheadEngine
from dgc.torch.untraced import untraced


class _WrappedTwice(ConfigError):
    """Raised in the backward pass, because it is unknown which of the two optimizers the script will step."""


class HorovodFrontEnd(FrontEnd):
    """Follows an optimizer that ``hvd.DistributedOptimizer`` made, by reading that optimizer's private fields.

    Source: horovod 0.28.1, ``horovod/torch/optimizer.py``, ``_DistributedOptimizer``.

    Attributes:
        results: the tensors for results of the step that is being exchanged, by index.
        lost: whether a step was given up after its exchange had begun. Horovod's optimizer cannot undo such a step.
    """

    lost = False

    def __init__(self, engine: Engine, compressor: HorovodCompressor) -> None:
        super().__init__(engine)
        self._compressor = weakref.ref(compressor)
        self._begun_without: set[int] | None = None
        self._handed: dict[int, HandedOver] = {}  # by index
        self._built = [(p.dtype, p.device) for p in engine.parameters]
        self.results: dict[int, torch.Tensor] = {}
        engine.follow(self)

    @property
    def _optimizer(self) -> Any:
        return self.owner

    @override
    def own(self, optimizer: torch.optim.Optimizer) -> None:
        _refuse_adasum(optimizer)
        super().own(optimizer)

    @override
    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        if (owner := self.owner) is not None:
            return optimizer is owner
        compressor = vars(optimizer).get("_compression")
        return compressor is not None and compressor is self._compressor()

    @property
    @override
    def waiting(self) -> Waiting:
        o = self._optimizer if self.drives else None
        if o is None:
            return Waiting.NOTHING
        if o._handles and not o._synchronized:  # in the backward pass, where a look at all delays would take long
            return Waiting.GRADIENTS
        if any(left != o.backward_passes_per_step for left in o._allreduce_delay.values()):
            return Waiting.GRADIENTS
        if o._synchronized:
            return Waiting.RESULTS
        return Waiting.GRADIENTS if o._handles else Waiting.NOTHING

    def hands_over_at_once(self, index: int) -> bool:
        """Return whether Horovod's optimizer submits this gradient when it arrives, so that the first begins a step.

        This is not so if it adds up several backward passes, or waits for groups of gradients. If the parameter was
        cast or moved after the wrapping, torch has dropped Horovod's hook, and ``step()`` submits the gradient.
        """
        p, o = self.engine.parameters[index], self._optimizer
        return o.backward_passes_per_step == 1 and not o._group_counts and (p.dtype, p.device) == self._built[index]

    def hand_over(self, index: int, gradient: torch.Tensor) -> bool:
        """Note a gradient that Horovod submits. Return whether Horovod has made it of zeros, because there was none.

        That is so if the parameter had no gradient when the step's first gradient came, and no backward pass has
        reached the parameter since. Zeros that the script has set are a gradient, as in dense training.
        """
        parameters, delays = self.engine.parameters, self._optimizer._allreduce_delay
        untouched = bool(delays.get(parameters[index]) == self._optimizer.backward_passes_per_step)
        if self._begun_without is None:
            self._begun_without = {i for i, p in enumerate(parameters) if p.grad is None}
            if untouched:  # the parameter had no gradient, and Horovod has already made zeros for it
                self._begun_without.add(index)
        self._handed[index] = HandedOver(gradient, gradient._version, gradient, None)
        return untouched and index in self._begun_without and not gradient.any()

    def take_back(self) -> int | None:
        """Forget the submitted gradients. Return the index of one that was changed since, or None."""
        handed, self._handed, self._begun_without = self._handed, {}, None
        return next((i for i, each in handed.items() if each.is_changed(self.engine.parameters[i])), None)

    @override
    def before_step(
        self, optimizer: torch.optim.Optimizer, closure: Closure | None, names_closure: bool
    ) -> Closure | None:
        if self.owns(optimizer):
            _refuse_adasum(optimizer)
        return super().before_step(optimizer, closure, names_closure)

    def is_asked_by_step(self) -> bool:
        """Return whether Horovod's ``step()`` asks for the results, rather than a script, which may look at them."""
        if self.update is None or self.update.by_closure or not self.drives:
            return False
        return "synchronize" not in vars(self._optimizer)

    @override
    def end_exchange_of_closure(self) -> None:
        if self.waiting is Waiting.GRADIENTS:
            self.engine.fail(
                ConfigError(
                    "Horovod's own optimizer does not average the gradients that a closure of step() computes: call "
                    "the closure, then step(), or optimizer.synchronize() in the closure and step(closure) inside "
                    "optimizer.skip_synchronize(); or take dgc.torch.DistributedOptimizer, which averages them"
                )
            )

    @override
    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        # Horovod makes gradients for parameters that have none on any rank, and Adam would move these parameters.
        for index in () if self.waiting is Waiting.GRADIENTS else self.engine.left_alone:
            self.engine.parameters[index].grad = None
        super().begin_update(optimizer)

    @override
    def give_up(self, through: bool = False) -> None:
        """Forget the backward passes since the last step.

        If all ranks had submitted all gradients (``through``), some may have made the update, and the others wait here
        for their placeholders. Otherwise, if the exchange had begun, the next step is an error.
        """
        if not self.drives:
            return
        self.take_back()
        optimizer = self._optimizer
        handles = [handle for handle, _ in optimizer._handles.values() if handle is not None]
        if through:
            wait_for(handles)
        else:
            self.lost |= bool(handles) or any(left <= 0 for left in optimizer._allreduce_delay.values())
        optimizer._handles.clear()
        for group in optimizer._group_counts:
            optimizer._group_counts[group] = 0
        optimizer._synchronized = False
        optimizer._should_synchronize = True
        optimizer.set_backward_passes_per_step(optimizer.backward_passes_per_step)


def _refuse_adasum(optimizer: torch.optim.Optimizer) -> None:
    """Refuse Horovod's optimizer for Adasum, which steps each parameter before it calls the compressor."""
    from horovod.torch.optimizer import _DistributedAdasumOptimizer

    if vars(type(optimizer)).get("synchronize") is _DistributedAdasumOptimizer.synchronize:
        raise ConfigError("op=Adasum cannot be combined with gradient compression; use op=hvd.Average")


class HorovodCompressor(CompressorBase[Engine]):
    """A Horovod ``Compressor``, whose two methods Horovod calls for each gradient."""

    _pending_error: DGCError | None = None
    _compared = False  # whether the ranks have compared the latest results, because the script synchronizes again
    _last_found = 0

    def __init__(self, options: dict[str, Any], algorithm: str = "dgc") -> None:
        super().__init__(options, algorithm)
        self._placeholders = Placeholders()
        self._front_end: HorovodFrontEnd | None = None

    @untraced
    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Begin the exchange of a gradient, and return a one-element placeholder for Horovod to reduce.

        Errors about the gradient are raised by :meth:`decompress`, on all ranks.

        Raises:
            ConfigError: the compressor is not bound to a model, or an earlier step was given up.
        """
        if tensor is None:  # Horovod was given the class, not an instance
            raise no_compressor(HorovodCompressor)
        engine = self._exchanging(
            "parameters: pass model.named_parameters() and optimizer=, or use dgc.torch.DistributedOptimizer, which "
            "binds them"
        )
        if engine is None:
            return tensor, None  # Horovod also calls this in a process set of one rank
        if isinstance(engine, StepAheadEngine):  # the optimizer steps on this rank's own gradient
            placeholder = self._placeholders.take()
            engine.stats.beside += placeholder.nbytes
            if not bool(torch.isfinite(tensor).all()):  # a GradScaler must skip the step on all ranks
                placeholder.fill_(math.nan)
            return placeholder, tensor
        front_end = self._front_end
        if front_end is not None and front_end.lost:
            raise ConfigError(
                "a step has failed after its exchange had begun, which Horovod's own optimizer cannot take back: build "
                "model, optimizer and compressor anew, or restart the job; dgc.torch.DistributedOptimizer goes on "
                "after reset()"
            )
        if (
            front_end is not None
            and self._pending_error is None
            and front_end.waiting is Waiting.RESULTS
            and (self._compared or engine.hands_back())
        ):
            # A second synchronize() in one step: the gradient is the step's result, which may have been clipped.
            self._compared = True
            placeholder = self._placeholders.take()
            engine.stats.add_sent(placeholder.nbytes)
            return placeholder, tensor
        result = tensor
        if self._pending_error is None:
            try:
                result = self._submit(engine, tensor)
            except (StallError, _WrappedTwice):
                raise  # either the other ranks do not take part, or decompress() will not be called
            except DGCError as error:
                # If the error were raised here, in a backward hook, the other ranks would wait for this rank's
                # placeholder.
                self._pending_error = error
        placeholder = self._placeholders.take()
        engine.stats.beside += placeholder.nbytes
        return placeholder, result

    @untraced
    def decompress(self, tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Wait for the exchange and return ``ctx``, mostly the gradient itself, which then holds the averaged result.

        Raises:
            ConfigError: the placeholder shows that Horovod uses another op than the compressor, or that a rank joined.
            DGCError: this or another rank failed.
        """
        if ctx is None:
            if tensor.is_sparse and self.engine is not None and not isinstance(self.engine, StepAheadEngine):
                gradients = (p.grad for p in self.engine.parameters)
                self.engine.refuse_sparse(next(i for i, g in enumerate(gradients) if g is not None and g.is_sparse))
            return tensor
        assert self.engine is not None
        reduced = float(tensor)
        self._placeholders.give_back(tensor, reduced)
        if isinstance(self.engine, StepAheadEngine):
            gradient: torch.Tensor = ctx
            if math.isnan(reduced):
                return gradient.fill_(math.nan)
            check_placeholder(reduced, op=self.config.op, size=self.engine.transport.size)
            return gradient
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            raise error
        front_end = self._front_end
        changed = None if front_end is None else front_end.take_back()
        if changed is not None:
            self.engine.fail(changed_gradient(self.engine, changed), changed)
        check_placeholder(reduced, op=self.config.op, size=self.engine.transport.size)
        ends = self.engine.exchange.in_step
        if front_end is not None:
            front_end.update_follows = front_end.is_asked_by_step()
        self.engine.finish()
        if front_end is not None and ends:
            results, front_end.results = front_end.results, {}
            front_end.keep_sample({} if front_end.update_follows else results)
        result: torch.Tensor = ctx
        return result

    @override
    def reset(self) -> None:
        super().reset()
        self._pending_error, self._compared = None, False

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending_error, self._compared = None, False

    def _submit(self, engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
        if self._front_end is None or not self._front_end.drives:
            self._bind_caller(engine)
        index = self._locate(engine, tensor)
        if index is None:
            engine.fail(
                LayoutError(
                    "Horovod passed a gradient that belongs to no parameter of this compressor: the optimizer has a "
                    "parameter that was not in named_parameters with requires_grad when the compressor was built, "
                    "two models share the compressor, or sparse_as_dense=True copied a sparse gradient"
                )
            )
        assert self._front_end is not None, "it has bound the caller"
        if not engine.exchange.in_step and self._front_end.hands_over_at_once(index):
            engine.refuse_results(index)
        self._compared = False
        absent = self._front_end.hand_over(index, tensor)
        result = engine.submit(index, tensor, absent=absent)  # Horovod will give .grad the memory of this tensor
        self._front_end.results[index] = result
        return result

    def _follow_horovod(self, engine: Engine) -> HorovodFrontEnd:
        if self._front_end is None:
            self._front_end = HorovodFrontEnd(engine, self)
        return self._front_end

    def _bind_caller(self, engine: Engine) -> None:
        owner: Any = find_owner(self)
        front_end = self._follow_horovod(engine)
        front_end.own(owner)
        front_end.drives = True
        if any(other.waiting is Waiting.GRADIENTS for other in front_end.others()):
            raise _WrappedTwice(
                "two distributed optimizers exchange the gradients of one backward pass, since hooks of both are on "
                "the parameters: wrap one optimizer, once, and for another one build the model anew"
            )
        self.require_same_set(getattr(owner, "process_set", self.process_set()))
        if getattr(owner, "sparse_as_dense", False):
            engine.fail(
                ConfigError(
                    "sparse_as_dense=True hides which parameter a gradient belongs to; use "
                    "dgc.torch.DistributedOptimizer, or give the embedding dense gradients (sparse=False)"
                )
            )

    def _locate(self, engine: Engine, tensor: torch.Tensor) -> int | None:
        """Find the parameter whose ``.grad`` is this very tensor. The search begins after the last one found."""
        count = len(engine.parameters)
        start = self._last_found
        for offset in range(count):
            index = (start - offset) % count
            if engine.parameters[index].grad is tensor:
                self._last_found = index - 1
                return index
        return None
