"""The front end of DDP's communication hook, which DDP calls for each bucket that the backward pass completes.

The call for the last bucket ends the exchange, inside ``backward()``. ``step()`` finds the results in ``.grad``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from typing_extensions import override

from dgc.errors import ConfigError, LayoutError
from dgc.torch.engine import Engine
from dgc.torch.front_end import FrontEnd, Waiting
from dgc.torch.untraced import untraced

_LOCAL = (
    "optimizer.step() was called with gradients that were not exchanged: the backward passes since the last step ran "
    "inside no_sync(), or did not reach every parameter (DDP's find_unused_parameters=True)"
)
_AGAIN = (
    "optimizer.step() was called again without a backward pass: .grad holds what the last step() applied, with the "
    "momentum and weight decay that the compressor applies; clear it with zero_grad(), or leave both in the optimizer: "
    "momentum=0 in the compressor"
)


class DDPFrontEnd(FrontEnd):
    """Submits the buckets of DDP's hook to the engine of one compressor; the last one ends the exchange."""

    exclusive = True
    rebuild = "wrap the module in a new DistributedDataParallel and register a new compressor"
    _joined = False  # whether this rank has run out of data and DDP calls the hook with zeros

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(engine)
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []  # a future, and its result
        self._results: dict[int, torch.Tensor] = {}  # by parameter index: the result's place in DDP's bucket
        self._owners: dict[int, int] = {}  # address of a gradient -> parameter index, in the step under way
        self._used: set[int] = set()  # parameters that got a gradient on this rank since the last exchange
        self.drive(optimizer, self._arrived)

    # -- the hook --------------------------------------------------------------------------------------------------

    def hand_over(self, bucket: dist.GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """Submit a bucket's gradients, and end the exchange with the last one. ``future`` gets the bucket's results."""
        engine, buffer = self.engine, bucket.buffer()
        if bucket.index() == 0:
            self._futures, self._results = [], {}
            self._owners.clear()
            if self._waiting is not Waiting.GRADIENTS:
                # On a rank without data, Join runs the hook on zeros, and the script does not clear results.
                self._require_stepped()
                self._joined = True
                for p in engine.parameters:
                    p.grad = None
        if buffer.is_sparse:
            engine.fail(ConfigError("DDP's hook takes dense gradients: build the embedding with sparse=False"))
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index = engine.adoption.index.get(id(p))
            if index is None:
                engine.fail(
                    LayoutError(
                        f"a parameter of shape {tuple(p.shape)} is in the DDP model and not in the optimizer that was "
                        "bound: give all to one optimizer, or call requires_grad_(False) before the model is wrapped"
                    )
                )
            if p.grad is not None and self._owners.setdefault(p.grad.data_ptr(), index) != index:
                # For a.view(s) + b.view(s), autograd gives one tensor to both parameters, and DDP would write both
                # results to it.
                p.grad = p.grad.clone()
            gradient = _in_strides_of(p, gradient)
            engine.submit(index, gradient, absent=index not in self._used and p.grad is None)
            self._results[index] = gradient
        self._futures.append((future, buffer))
        if bucket.is_last():
            self._finish(engine)

    def _finish(self, engine: Engine) -> None:
        engine.finish()
        self._keep_unused(engine)
        self.keep_sample(self._results)
        self._waiting = Waiting.RESULTS
        self._used.clear()
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures = []

    def _keep_unused(self, engine: Engine) -> None:
        """Put the results of parameters that this rank has not used into ``.grad``, because DDP drops them."""
        unused = self._results.keys() - self._used - engine.left_alone
        views = bool(unused) and any(_share_memory(engine.parameters[i].grad, self._results[i]) for i in self._used)
        for index in unused:
            p, result = engine.parameters[index], self._results[index]
            if p.grad is not None:
                p.grad.copy_(result)
            elif self._joined or result.any():
                p.grad = result if views else result.clone()  # gradient_as_bucket_view=True requires views

    def _require_stepped(self) -> None:
        """Refuse a rank without data that has not made the latest update, if results contain momentum or decay."""
        if self._joined and self._waiting is Waiting.RESULTS and self.engine.adoption.has_velocity:
            wrong = "a rank without data has not followed the updates: use Join([model, state])"
            self.engine.fail(ConfigError(wrong))

    @untraced
    def _arrived(self, index: int, _: torch.Tensor) -> None:
        """Note that a backward pass has added to a gradient, perhaps inside ``no_sync()``."""
        self._used.add(index)
        if self._waiting is not Waiting.GRADIENTS:
            self._require_stepped()
            self.engine.refuse_results(index)
            if self._waiting is Waiting.RESULTS and self.update is None:  # a closure may be called more than once
                self.engine.warn_of_dropped(index)
            # The exchange begins later, with the first bucket, and reads the optimizer's options then. A script may
            # step its scheduler between passes inside no_sync().
            self._waiting, self._joined = Waiting.GRADIENTS, False

    def step_joined(self) -> None:
        """Apply the results that the hook has put into ``.grad`` on a rank without data."""
        if self._waiting is Waiting.RESULTS and (optimizer := self.owner) is not None:
            if not self._joined:  # .grad holds gradients that were added up in no_sync() and never exchanged
                for index, result in self._results.items():
                    self.engine.parameters[index].grad = result.clone()
            optimizer.step()
            optimizer.zero_grad()

    # -- around step() ---------------------------------------------------------------------------------------------

    @override
    def end_exchange(self, optimizer: torch.optim.Optimizer) -> None:
        if self._waiting is not Waiting.NOTHING or not self.only_makes_state(optimizer):
            self.end_exchange_of_closure()

    @override
    def end_exchange_of_closure(self) -> None:
        """Check that the hook has exchanged the gradients, in ``backward()``, before they are applied."""
        engine = self.engine
        if self._waiting is Waiting.GRADIENTS:
            engine.fail(LayoutError(_LOCAL))
        if self._waiting is Waiting.NOTHING and engine.adoption.has_velocity:
            if any(p.grad is not None for p in engine.parameters):
                raise ConfigError(_AGAIN)

    @override
    def begin_anew(self) -> None:
        self._waiting = Waiting.NOTHING
        self._futures, self._results = [], {}
        self._used.clear()


def _in_strides_of(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its parameter's strides, if these leave no gaps: DDP's buckets use this element order.

    ``GradBucket.gradients()`` reads each part of the bucket as if it were contiguous.
    """
    if p.is_contiguous() or torch.empty_like(p, device="meta").stride() != p.stride():
        return gradient
    return gradient.as_strided(p.shape, p.stride())


def _share_memory(gradient: torch.Tensor | None, result: torch.Tensor) -> bool:
    return gradient is not None and gradient.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
