"""What becomes of a step between ``synchronize()`` and ``step()``: applied, carried on in ``.grad``, or dropped."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dgc.core.exchange.exchange import Exchange
from dgc.torch.engine.tensors import samples


class LastStep:
    """Learns whether the latest step was applied, and takes it back if its gradients were dropped instead.

    A step counts as applied once an optimizer over any of its parameters begins to step. Gradients count as dropped
    when the owner's ``zero_grad()`` has run, or when the next step finds other or cleared gradients; otherwise what was
    exchanged is still in ``.grad``, and will be exchanged again with what is added there.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], exchange: Callable[[], Exchange]) -> None:
        """Take the parameters, and a function that returns the exchange that is in use."""
        self._parameters = parameters
        self._exchange = exchange
        self._gradient: tuple[torch.Tensor, torch.Tensor, int] | None = None
        self._values: list[np.ndarray] | None = None
        self._versions: list[int] = []
        self._seen_stepping = False
        self._warned = False

    @property
    def is_open(self) -> bool:
        """Whether the latest step can still be taken back."""
        return self._exchange().unapplied.pending

    def concluded(self) -> None:
        """The exchange has finished a step, which was not applied yet."""
        if not self._exchange().unapplied.pending:
            self._forget()
            return
        held = next((p for p in self._parameters if p.grad is not None and not p.grad.is_sparse), None)
        if held is not None:
            self._gradient = held, held.grad, held.grad._version
        if not self._seen_stepping:
            # Somebody who never calls step() updates the parameters without an optimizer.
            self._versions = [p._version for p in self._parameters]
            self._values = [samples(p) for p in self._parameters]

    def applied(self) -> None:
        """An optimizer steps the parameters now, or has done so since a closure exchanged their gradients."""
        unapplied = self._exchange().unapplied
        if unapplied.pending:
            self._seen_stepping = True
            unapplied.settle()
        self._forget()

    def cleared(self) -> None:
        """The owner's ``zero_grad()`` has run."""
        if not self._exchange().unapplied.pending:
            return
        if _within_a_step():  # in a closure, which may run several times in one step
            self.applied()
        else:
            self._drop()

    def next_begins(self) -> None:
        """The first gradient of the next step is there."""
        if not self._exchange().unapplied.pending:
            return
        if self._was_cleared():
            self._drop()
        else:
            self._exchange().unapplied.settle()
            self._forget()

    def discard(self) -> bool:
        """Take the step back because the user says so.

        Returns:
            False when there is nothing to take back.

        Raises:
            LayoutError: in the middle of a step.
        """
        self._exchange().require_between_steps("discard_step()")
        taken = self._exchange().unapplied.take_back()
        self._forget()
        return taken

    def _drop(self) -> None:
        unapplied = self._exchange().unapplied
        if self._changed():
            unapplied.settle()
        elif unapplied.take_back() and not unapplied.exact and not self._warned:
            self._warned = True
            warnings.warn(
                "a step was exchanged by synchronize() but not applied by step(); its gradient stays in the "
                "compressor's residuals and is applied later, where dense training drops it: give the compressor "
                "discardable=True to have it dropped",
                RuntimeWarning,
                stacklevel=4,
            )
        self._forget()

    def _was_cleared(self) -> bool:
        """Whether the gradient that was kept in mind is gone, or has been set to 0."""
        if self._gradient is None:
            return False
        parameter, gradient, version = self._gradient
        if parameter.grad is not gradient:
            return True
        return gradient._version != version and not bool(gradient.any())

    def _changed(self) -> bool:
        """Whether somebody else has updated the parameters; only asked until an optimizer was seen stepping them."""
        if self._values is None:
            return False
        if self._versions != [p._version for p in self._parameters]:
            return True
        now = [samples(p) for p in self._parameters]
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(self._values, now, strict=True))

    def _forget(self) -> None:
        self._gradient = self._values = None


def _within_a_step() -> bool:
    """Whether an optimizer's ``step`` is among the callers."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
